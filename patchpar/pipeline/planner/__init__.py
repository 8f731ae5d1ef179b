"""What a plan costs on a machine: programs of ranks recorded without weights, priced, and replayed."""
