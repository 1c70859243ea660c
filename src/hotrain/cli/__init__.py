"""The command line: each command a thin call into the library, imported when it runs."""
