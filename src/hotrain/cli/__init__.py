"""The command line: one file per command, each a thin call into the library, imported when it runs."""
