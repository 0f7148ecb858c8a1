"""Write `tiny.gguf`: a random llama with its own vocabulary, small enough to lie in the tests.

    python tests/engines/make_tiny_model.py [OUT]

A real engine then answers in the tests and nothing has to be downloaded. Two layers, width 64, Q8_0. The
weights are hashes of their tensor's name, so the file is the same on every machine. The model never ends by
itself: one hidden channel is the same positive number for every token, no layer writes to it, and the
output row of everything that isn't a word of the list hangs on it with a large negative weight. So every
token is a word, and `max_tokens` is always reached. A prompt of the list's words has one token a word, and
one to begin with.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from pathlib import Path
from typing import NamedTuple

LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, CONTEXT = 2, 64, 192, 4, 2, 4096
HEAD_WIDTH = WIDTH // HEADS
STEADY = 0  # the hidden channel that is the same for all tokens
SPACE = "\u2581"  # what a SentencePiece vocabulary writes for a space
WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their if will "
    "up other about out many then them these so some her would make like him into time has look two more "
    "write go see number no way could people my than first water been call who oil its now find long down "
    "day did get come made may part over new sound take only little work know place year live me back "
    "give most very after thing our just name good sentence man think say great where help through much "
    "before line right too mean old any same tell boy follow came want show also around form three small "
    "set put end does another well large must big even such because turn here why ask went men read need "
    "land different home us move try kind hand picture again change off play spell air away animal house "
    "point page letter mother answer found study still learn should world"
).split()
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Numbers of the file format.
VERSION = 3
ALIGNMENT = 32  # the default, so the file doesn't say it: dasllama 0.6.6 fails on the key
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # value types
F32, Q8_0 = 0, 8  # tensor types


class Token(NamedTuple):
    text: str
    score: float
    kind: int


class Tensor(NamedTuple):
    name: str
    kind: int
    shape: tuple[int, ...]  # columns first, as the format has it
    content: bytes


def vocabulary() -> list[Token]:
    """Return specials, bytes, words with the beginnings they are merged from (longest first), characters."""
    specials = [Token("<unk>", 0, UNKNOWN), Token("<s>", 0, CONTROL), Token("</s>", 0, CONTROL)]
    raw = [Token(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    beginnings = {(SPACE + word)[:end] for word in WORDS for end in range(2, len(word) + 2)}
    pieces = [*sorted(beginnings, key=lambda piece: (-len(piece), piece)), SPACE, *map(chr, range(33, 127))]
    return specials + raw + [Token(piece, -rank, NORMAL) for rank, piece in enumerate(pieces)]


def drawn(name: str, rows: int, columns: int) -> list[list[int]]:
    """Return whole weights from -127 to 127, drawn from a hash of the name."""
    noise = hashlib.shake_256(name.encode()).digest(rows * columns)
    weights = [byte % 255 - 127 for byte in noise]
    return [weights[row * columns : (row + 1) * columns] for row in range(rows)]


def q8_0(row: list[int], scale: float) -> bytes:
    """Pack a row as Q8_0: for every 32 weights their scale in half precision, then one byte each."""
    blocks = [row[start : start + 32] for start in range(0, len(row), 32)]
    return b"".join(struct.pack("<e32b", scale, *block) for block in blocks)


def matrix(name: str, rows: int, columns: int, writes_to_the_stream: bool = False) -> Tensor:
    """Return a random matrix that keeps the size of what it is applied to."""
    weights = drawn(name, rows, columns)
    if writes_to_the_stream:
        weights[STEADY] = [0] * columns
    scale = 1 / (73 * columns**0.5)  # 73 is the standard deviation of the whole weights
    return Tensor(name, Q8_0, (columns, rows), b"".join(q8_0(row, scale) for row in weights))


def ones(name: str) -> Tensor:
    """Return the weights of a norm that only normalises."""
    return Tensor(name, F32, (WIDTH,), struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH))


def embedding(tokens: list[Token]) -> Tensor:
    """Return random embeddings whose steady channel is 1."""
    rows = drawn("token_embd.weight", len(tokens), WIDTH)
    for row in rows:
        row[STEADY] = 127
    content = b"".join(q8_0(row, 1 / 127) for row in rows)
    return Tensor("token_embd.weight", Q8_0, (WIDTH, len(tokens)), content)


def output(tokens: list[Token]) -> Tensor:
    """Return random output rows for words; the rest gets a large negative logit from the steady channel."""
    words = {SPACE + word for word in WORDS}
    never = [-127 if channel == STEADY else 0 for channel in range(WIDTH)]
    rows = []
    for token, row in zip(tokens, drawn("output.weight", len(tokens), WIDTH), strict=True):
        row[STEADY] = 0
        rows.append(q8_0(row, 1 / 127) if token.text in words else q8_0(never, 1.0))
    return Tensor("output.weight", Q8_0, (WIDTH, len(tokens)), b"".join(rows))


def layer(number: int) -> list[Tensor]:
    """Return the tensors of one layer."""
    block = f"blk.{number}."
    return [
        ones(block + "attn_norm.weight"),
        ones(block + "ffn_norm.weight"),
        matrix(block + "attn_q.weight", HEADS * HEAD_WIDTH, WIDTH),
        matrix(block + "attn_k.weight", KV_HEADS * HEAD_WIDTH, WIDTH),
        matrix(block + "attn_v.weight", KV_HEADS * HEAD_WIDTH, WIDTH),
        matrix(block + "attn_output.weight", WIDTH, HEADS * HEAD_WIDTH, writes_to_the_stream=True),
        matrix(block + "ffn_gate.weight", FEED_FORWARD, WIDTH),
        matrix(block + "ffn_up.weight", FEED_FORWARD, WIDTH),
        matrix(block + "ffn_down.weight", WIDTH, FEED_FORWARD, writes_to_the_stream=True),
    ]


def string(text: str) -> bytes:
    """Return a string as the format has it: its length in bytes, then UTF-8."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: object) -> bytes:
    """Return one value without its type."""
    if kind == STRING:
        return string(str(content))
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], content)


def pair(key: str, kind: int, content: object) -> bytes:
    """Return a key, the type of its value and the value."""
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def array(key: str, kind: int, contents: list) -> bytes:
    """Return a key and an array of values of one type."""
    head = string(key) + struct.pack("<IIQ", ARRAY, kind, len(contents))
    return head + b"".join(value(kind, content) for content in contents)


def metadata(tokens: list[Token]) -> list[bytes]:
    """Return what the file says of the model and its tokenizer."""
    return [
        pair("general.architecture", STRING, "llama"),
        pair("general.name", STRING, "llmprofile-tiny-random"),
        pair("general.file_type", UINT32, 7),  # mostly Q8_0
        pair("llama.vocab_size", UINT32, len(tokens)),
        pair("llama.context_length", UINT32, CONTEXT),
        pair("llama.embedding_length", UINT32, WIDTH),
        pair("llama.block_count", UINT32, LAYERS),
        pair("llama.feed_forward_length", UINT32, FEED_FORWARD),
        pair("llama.rope.dimension_count", UINT32, HEAD_WIDTH),
        pair("llama.rope.freq_base", FLOAT32, 10000.0),
        pair("llama.attention.head_count", UINT32, HEADS),
        pair("llama.attention.head_count_kv", UINT32, KV_HEADS),
        pair("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        pair("tokenizer.ggml.model", STRING, "llama"),
        array("tokenizer.ggml.tokens", STRING, [token.text for token in tokens]),
        array("tokenizer.ggml.scores", FLOAT32, [token.score for token in tokens]),
        array("tokenizer.ggml.token_type", INT32, [token.kind for token in tokens]),
        pair("tokenizer.ggml.unknown_token_id", UINT32, 0),
        pair("tokenizer.ggml.bos_token_id", UINT32, 1),
        pair("tokenizer.ggml.eos_token_id", UINT32, 2),
        pair("tokenizer.ggml.add_bos_token", BOOL, True),
        pair("tokenizer.ggml.add_eos_token", BOOL, False),
        pair("tokenizer.chat_template", STRING, CHAT_TEMPLATE),
    ]


def padded(data: bytes) -> bytes:
    """Return the bytes followed by zeros up to the next multiple of the alignment."""
    return data + bytes(-len(data) % ALIGNMENT)


def model() -> bytes:
    """Return the whole file."""
    tokens = vocabulary()
    layers = [tensor for number in range(LAYERS) for tensor in layer(number)]
    tensors = [embedding(tokens), *layers, ones("output_norm.weight"), output(tokens)]
    described = metadata(tokens)
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(described)) + b"".join(described)
    content = b""
    for name, kind, shape, data in tensors:
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(content))
        content += padded(data)
    return padded(head) + content


def main() -> None:
    """Write the file to where the first argument says, or to where the tests look for it."""
    default = Path(__file__).resolve().parent.parent / "data" / "tiny.gguf"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    data = model()
    out.write_bytes(data)
    print(f"{out}: {len(data)} bytes")


if __name__ == "__main__":
    main()
