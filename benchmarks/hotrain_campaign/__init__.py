"""Campaigns against the library: what happens over thousands of steps, under faults, and with damaged input."""
