"""Model files: reading them without trusting them, writing them without losing anything."""
