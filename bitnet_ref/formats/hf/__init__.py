"""Hugging Face folders: config.json, safetensors (one file or shards), tokenizer. Read and written."""
