"""Threads, memory, file locks, atomic files, JSON: what the operating system gives. May import `errors`."""
