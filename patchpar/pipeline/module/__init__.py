"""One network of any library, whose calls several ranks compute together: processes, or threads of one process."""
