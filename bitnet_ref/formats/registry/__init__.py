"""Models by name: those of the Hugging Face cache (`hub_cache`), and folders and files of this machine that were given
a name (`links`). `pull` fetches, names and deletes. `old_store` moves what earlier versions stored elsewhere.
"""
