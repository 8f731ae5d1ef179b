"""The `patchpar` command; also `python -m patchpar`, and `torchrun -m patchpar`."""

import sys


def main() -> None:
    """Entry point of the command."""
    try:
        from patchpar.cli import main as command  # inside, so that ctrl-C meanwhile is no traceback either

        command()
    except KeyboardInterrupt:  # while something was imported: a verb handles signals itself once it runs
        if sys.stderr is not None:  # None: it was closed before the command
            sys.stderr.write("ended by SIGINT\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
