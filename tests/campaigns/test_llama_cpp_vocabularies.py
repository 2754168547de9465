"""llama.cpp's own vocabularies: every text of NAME.gguf.inp gets the ids of NAME.gguf.out.

BITNET_REF_VOCABULARIES names the folder with ggml-vocab-*.gguf: models/ of llama.cpp, which the source distribution of
llama-cpp-python has in vendor/llama.cpp (`pip download llama-cpp-python --no-binary :all: --no-deps`).
"""

import os
from pathlib import Path

import pytest

from bitnet_ref.errors import TokenizerError
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.gguf_vocab import tokenizer_files_from_gguf

FOLDER = os.environ.get("BITNET_REF_VOCABULARIES")
REFUSED = {"aquila": "pre: ", "gpt-neox": "pre: ", "bert-bge": "'bert'", "nomic-bert-moe": "'t5'"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="BITNET_REF_VOCABULARIES does not name llama.cpp's models/ folder"),
]


def _metadata(path):
    with GgufFile(path) as file:
        return file.metadata


def test_all_pairs_are_equal():
    compared = {}
    for path in sorted(Path(FOLDER).glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        if name in REFUSED:
            with pytest.raises(TokenizerError, match=REFUSED[name]):
                tokenizer_files_from_gguf(_metadata(path), path)
            continue
        tokenizer = load_tokenizer_files(tokenizer_files_from_gguf(_metadata(path), path))
        if not (texts := path.with_name(f"{path.name}.inp")).is_file():
            continue
        lines = path.with_name(f"{path.name}.out").read_text().split("\n")
        inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        for text, line in zip(inputs, lines, strict=False):  # a last text is empty in some files
            ids, expected = tokenizer.encode(text), [int(each) for each in line.split()]
            starts_with_bos = ids[:1] == [tokenizer.bos_id] != expected[:1]  # llama.cpp compares without it
            assert (ids[1:] if starts_with_bos else ids) == expected, (name, text)
        compared[name] = len(inputs)
    print(f"\n{sum(compared.values())} texts of {len(compared)} vocabularies: {', '.join(compared)}")
    assert len(compared) >= 10
