"""The command line: one file a verb, each a thin call into the library, imported when it runs."""
