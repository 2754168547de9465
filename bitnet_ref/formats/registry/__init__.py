"""Models by name: a local store, filled from the Hugging Face hub or from local files, and found again offline.

    pull("org/repo@revision")      download, check, store            add("./folder", "name")   the same from here
    find("org/repo")               the path to load, or None         entries(), remove(name)

The store is a folder (BITNET_REF_HOME; by default bitnet_ref in the user's cache folder). A version of a model is a
folder in it named by the hash of its content, and an index says which names and revisions stand for which.
"""

from .hub import pull
from .names import Reference, parse_reference
from .store import Entry, Store, add, entries, find, remove

__all__ = ["Entry", "Reference", "Store", "add", "entries", "find", "parse_reference", "pull", "remove"]
