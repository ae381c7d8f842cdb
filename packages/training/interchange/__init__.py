"""Drafters out of and into the registry, in the spellings of other engines: mode=export and mode=import."""
