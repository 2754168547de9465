"""Threads, memory, file locks, atomic files, JSON, and how options are declared. May import `errors`."""
