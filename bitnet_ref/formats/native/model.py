"""The native file, `NAME.bitnet.safetensors`: a whole model in one safetensors file, as bitnet_ref computes with it.

Tensors carry the model's own names. A linear is ternary, with a bias, with a norm inside, as the config has it:

    embedding                             (V, D)  BF16, F16 or F32; `lm_head.weight` too unless it is tied
    blocks.0.attn_norm ... final_norm     (D,)    F32
    blocks.0.attn.q_proj.packed           (N, ceil(K/4)) U8, two bits a weight: `quantization.pack_ternary`; or
                        .trits            (N, ceil(K/5)) U8, 1.6 bits a weight: `base3`
                        .w_dequant_scale  ()      F32: W ~ w_t * w_dequant_scale, in every native file
                        .weight           (N, K)  BF16, F16 or F32, of a linear that is dense
                        .bias             (N,)    F32        .input_norm  (K,) F32
    tokenizer/tokenizer.json ...          (n,)    U8: the tokenizer's files, byte for byte, chat template among them

Metadata: `format` "bitnet_ref", `format_version`, `config` (ModelConfig as JSON; its quantization says how the
checkpoint was made, not how this file stores it) and `content_hash`, a SHA-256 over everything else.

A file of an older version is migrated as it is opened: see `MIGRATIONS`. Writing is in `native_writer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError
from ...reference import quantization
from ...reference.config import ModelConfig
from ...reference.weights import DenseWeight, InputNorm, LinearWeight, TernaryWeight
from ...system.json_file import parse_json_object
from ..checkpoint import Checkpoint, Progress, ReadOptions, has_bias, is_ternary, linear_shape, norms_of_layer
from ..hf.folder import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, CheckpointTensors
from ..safetensors import DTYPES, TensorInfo
from .base3 import TRITS_PER_BYTE, first_invalid_byte, unpack_base3

SUFFIX = ".bitnet.safetensors"
FORMAT, VERSION = "bitnet_ref", 1
TOKENIZER_PREFIX = "tokenizer/"
_HASH_BLOCK = 1 << 22

# version n -> what makes a file of version n one of n + 1. It may change the metadata, and the names: a dictionary
# from the name that this version of the package looks for to the tensor's name in the file.
Migration = Callable[[dict[str, str], dict[str, str]], None]
MIGRATIONS: dict[int, Migration] = {}


class NativeCheckpoint(Checkpoint):
    """A native file, opened. `evidence` says which storage its planes have."""

    def __init__(
        self,
        path: Path,
        options: ReadOptions | None = None,
        *,
        version: int = VERSION,
        migrations: Mapping[int, Migration] = MIGRATIONS,
    ) -> None:
        self.path, self.kind = path, "native"
        self.tensors = CheckpointTensors(path)
        try:
            self.stored_metadata = self.tensors.metadata
            self._metadata = dict(self.stored_metadata)
            self._names = {name: name for name in self.tensors.names}
            self._migrate(version, migrations)
            self.config = self._read_config()
            if options is not None and options.verify:
                self.verify()
        except BaseException:
            self.close()
            raise
        base3 = sum(name.endswith(".trits") for name in self._names)
        planes = base3 + sum(name.endswith(".packed") for name in self._names)
        self.evidence = [f"{planes} ternary planes, {base3} of them in base 3"]

    def close(self) -> None:
        self.tensors.close()

    # -- header --------------------------------------------------------------------------------------------------------

    def _bad(self, key: str, message: str) -> FormatError:
        return FormatError(message, path=self.path, offset=8, field=f"__metadata__.{key}")

    def _migrate(self, version: int, migrations: Mapping[int, Migration]) -> None:
        said = self._metadata.get("format")
        if said != FORMAT:
            message = f"expected {FORMAT!r}, got {said!r}: not a native file, whatever its name; if it belongs to a "
            raise self._bad("format", message + "Hugging Face folder, load the folder")
        text = self._metadata.get("format_version", "")
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and text == str(int(text)) and int(text)):
            raise self._bad("format_version", f"expected a whole number from 1, got {text[:100]!r}")
        self.stored_version = int(text)
        if self.stored_version > version:
            raise self._bad(
                "format_version",
                f"the file is of version {text}, and this bitnet_ref reads up to version {version}: "
                "pip install --upgrade bitnet-ref, or write the file again with this one",
            )
        for step in range(self.stored_version, version):
            migrations[step](self._metadata, self._names)

    def _read_config(self) -> ModelConfig:
        field = "__metadata__.config"
        if "config" not in self._metadata:
            raise self._bad("config", "is required and absent")
        data = self._metadata["config"].encode("utf-8", "surrogatepass")
        try:
            config = ModelConfig.from_dict(parse_json_object(data, FormatError, self.path))
        except (ConfigError, FormatError) as error:
            inner = f"{field}.{error.field}" if error.field else field
            raise FormatError(error.message, path=self.path, offset=8, field=inner) from None
        if config.num_hidden_layers > len(self._names):  # before anything is counted or named layer by layer
            message = f"says {config.num_hidden_layers} layers, and the file has {len(self._names)} tensors"
            raise self._bad("config.num_hidden_layers", message)
        return config

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _take(self, name: str, shape: tuple[int, ...], *dtypes: str) -> NDArray:
        return self.tensors.take(self._names.get(name, name), shape, dtypes or ("BF16", "F16", "F32"))

    def _fail(self, name: str, message: str) -> FormatError:
        return self.tensors.fail(self._names.get(name, name), message)

    def embedding(self) -> DenseWeight:
        return DenseWeight(self._take("embedding", (self.config.vocab_size, self.config.hidden_size)))

    def norm(self, name: str) -> NDArray[np.float32]:
        sizes = {"final_norm": self.config.hidden_size}
        if name != "final_norm":
            sizes = norms_of_layer(self.config, int(name.split(".")[1]))
        return self._take(name, (sizes[name],), "F32")

    def linear(self, name: str) -> LinearWeight:
        cfg = self.config
        n, k = linear_shape(cfg, name)
        bias = self._take(f"{name}.bias", (n,), "F32") if has_bias(cfg, name) else None
        if not is_ternary(cfg, name):
            return DenseWeight(self._take(f"{name}.weight", (n, k)), bias)
        packed = self._trits(name, n, k) if f"{name}.trits" in self._names else self._packed(name, n, k)
        scale = np.float32(self._take(f"{name}.w_dequant_scale", (), "F32"))
        with np.errstate(over="ignore"):
            if scale <= 0 or not np.isfinite(np.float32(1.0) / scale):
                raise self._fail(f"{name}.w_dequant_scale", f"expected a scale above zero, got {scale}")
        input_norm = None
        if cfg.quantization is not None and cfg.quantization.use_rms_norm:
            input_norm = InputNorm(self._take(f"{name}.input_norm", (k,), "F32"), cfg.quantization.rms_norm_eps)
        return TernaryWeight(packed, k, scale, bias, input_norm)

    def _packed(self, name: str, n: int, k: int) -> NDArray[np.uint8]:
        name += ".packed"
        packed = self._take(name, (n, -(-k // quantization.CODES_PER_BYTE)), "U8")
        if (at := quantization.first_invalid_code(packed)) is not None:
            raise self._fail(name, f"holds the invalid ternary code 3 in byte {list(at)} (0x{packed[at]:02x})")
        self._check_padding(name, packed[:, -1] >> np.uint8(2 * (k % 4)), 0x55 >> 2 * (k % 4), k % 4)
        return packed

    def _trits(self, name: str, n: int, k: int) -> NDArray[np.uint8]:
        name += ".trits"
        trits = self._take(name, (n, -(-k // TRITS_PER_BYTE)), "U8")
        if (at := first_invalid_byte(trits)) is not None:
            raise self._fail(name, f"holds {trits[at]} in byte {list(at)}; expected five trits, 0 to 242")
        place = 3 ** (k % TRITS_PER_BYTE)
        self._check_padding(name, trits[:, -1] // np.uint8(place), 121 // place, k % TRITS_PER_BYTE)
        return unpack_base3(trits, k)

    def _check_padding(self, name: str, last: NDArray[np.uint8], zeros: int, used: int) -> None:
        """The places of a row's last byte beyond K are zero weights: a matrix has one form only."""
        if used and (last != zeros).any():
            row = int(np.flatnonzero(last != zeros)[0])
            raise self._fail(name, f"row {row} goes on after its last weight; expected zero weights as padding")

    def dense_dtype(self, name: str) -> np.dtype:
        tensor = name if name == "embedding" else f"{name}.weight"
        if tensor not in self._names:
            return super().dense_dtype(name)  # which says what is wrong
        return DTYPES[self._info(tensor).dtype]

    def tokenizer_files(self) -> dict[str, bytes]:
        files = {}
        for name in self._names:
            if not name.startswith(TOKENIZER_PREFIX):
                continue
            short = name.removeprefix(TOKENIZER_PREFIX)
            info = self._info(name)
            if short not in TOKENIZER_FILES:
                raise self._fail(name, f"expected one of {', '.join(TOKENIZER_FILES)} after {TOKENIZER_PREFIX!r}")
            if len(info.shape) != 1 or info.nbytes > MAX_TOKENIZER_BYTES:
                raise self._fail(name, f"expected at most {MAX_TOKENIZER_BYTES} bytes, got the shape {info.shape}")
            files[short] = self._take(name, info.shape, "U8").tobytes()
        return files

    def _info(self, name: str) -> TensorInfo:
        return self.tensors.info(self._names[name])

    def finish(self) -> None:
        self.tokenizer_files()  # part of the file: a broken one is found at load, not at the first prompt
        used = self.tensors.taken
        left = [name for name, stored in self._names.items() if stored not in used]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise self._fail(left[0], f"this tensor is no part of the model that the file's config describes{more}")

    # -- content hash --------------------------------------------------------------------------------------------------

    @property
    def content_hash(self) -> str:
        """What the file says of itself: "sha256:" and 64 hexadecimal digits."""
        return self.stored_metadata.get("content_hash", "")

    def verify(self, progress: Progress | None = None) -> str:
        """Compute the content hash from every byte and return it. FormatError if the file says another.

        It reads the whole file once more, at about 0.4 GB/s where the processor has no SHA instructions.
        """
        digests = {}
        for number, name in enumerate(self.tensors.names):
            info, digest = self.tensors.info(name), hashlib.sha256()
            for block in self.tensors.blocks(name, _HASH_BLOCK):
                digest.update(block)
            digests[name] = (info.dtype, info.shape, digest.hexdigest())
            if progress is not None:
                progress(number + 1, len(self.tensors.names))
        found = content_hash(self.stored_metadata, digests)
        if found != self.content_hash:
            message = f"the file says {self.content_hash[:100]!r}, its content gives {found}: it was changed or damaged"
            raise self._bad("content_hash", message)
        return found


def content_hash(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The hash of a file's content. tensors: name -> (dtype, shape, SHA-256 of its bytes in hexadecimal).

    It does not depend on the order of the tensors in the file, so it can be had while writing, one tensor at a time.
    """
    facts = {
        "metadata": {key: value for key, value in metadata.items() if key != "content_hash"},
        "tensors": {name: [dtype, list(shape), digest] for name, (dtype, shape, digest) in tensors.items()},
    }
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
