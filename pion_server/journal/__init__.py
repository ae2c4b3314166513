"""The log of mutations: what was acknowledged is there again after a crash. Stands on store."""
