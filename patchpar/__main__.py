"""`python -m patchpar`, and `torchrun -m patchpar`."""

from patchpar.cli import main

if __name__ == "__main__":
    main()
