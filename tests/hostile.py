"""Messages that somebody might send who means harm, or who speaks another version.

Two ways to make them. *Mutations* of valid messages, which cost microseconds: of the frames of any ZMQ receiver, and of
HTTP requests. *Strategies* of hypothesis over the types of a wire, which know its structure: values of the right type,
and in some places one that is too large, too deep, of another type, or missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

NESTED = b"\x91" * 100_000 + b"\xc0"
"""A msgpack value in so many lists."""
NUMBERS = [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf0" + b"\0" * 6, b"\xc0", b"\x80", b"\x90"]
"""As msgpack: the largest, the smallest, infinity, nothing, and two containers."""
COUNTS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
"""As msgpack: the beginnings of an array, a map, bytes and a text of four thousand million items."""


def with_unknown_field(body: bytes) -> bytes:
    """The msgpack map `body` (of up to 15 fields) with one more field, nested so deeply that decoders give up."""
    fields = body[0] - 0x80  # a map of at most 15 fields begins with 0x80 and their number
    return b"\xde" + (fields + 1).to_bytes(2, "big") + body[1:] + b"\xa1x" + NESTED


# --- mutations ---


def messages(valid: Sequence[Sequence[bytes]], *, count: int, seed: int = 0) -> Iterator[list[bytes]]:
    """`count` messages made from `valid` ones, most of them broken in one way or several."""
    dice = random.Random(seed)
    for _ in range(count):
        yield mutated(dice.choice(valid), dice)


def mutated(valid: Sequence[bytes], dice: random.Random) -> list[bytes]:
    """The message `valid`, broken in one way or several."""
    frames = [bytearray(frame) for frame in valid]
    for _ in range(dice.choice((1, 1, 2, 5))):
        match dice.randrange(10):
            case 0:  # other bytes
                frame = dice.choice(frames)
                for _ in range(dice.randrange(1, 9) if frame else 0):
                    frame[dice.randrange(len(frame))] = dice.randrange(256)
            case 1:  # one bit
                frame = dice.choice(frames)
                if frame:
                    frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
            case 2:  # another number, no number, or more than there is
                frame = dice.choice(frames)
                at = dice.randrange(len(frame) + 1)
                frame[at : at + 1] = dice.choice(NUMBERS + COUNTS)
            case 3:
                frame = dice.choice(frames)
                del frame[dice.randrange(len(frame) + 1) :]
            case 4:
                frames.insert(dice.randrange(len(frames) + 1), bytearray(dice.randbytes(dice.randrange(40))))
            case 5 if len(frames) > 1:
                frames.pop(dice.randrange(len(frames)))
            case 6:
                dice.shuffle(frames)
            case 7:  # the same once more
                at = dice.randrange(len(frames))
                frames[at:at] = [bytearray(frames[at]) for _ in range(dice.choice((1, 2, 20)))]
            case 8 if len(frames) > 1:  # what belongs into one frame is in another
                first, second = dice.sample(range(len(frames)), 2)
                moved = dice.randrange(len(frames[first]) + 1)
                frames[second] += frames[first][moved:]
                del frames[first][moved:]
            case _:
                frame = dice.choice(frames)
                frame[dice.randrange(len(frame) + 1) : 0] = NESTED[-dice.choice((10, 10, 10, 5000, 100_001)) :]
    return [bytes(frame) for frame in frames]


class Request(NamedTuple):
    """A request of HTTP/1.1."""

    method: str
    target: str
    headers: dict[str, str]
    """But for those about the connection, the length of the body, and who asks."""
    body: bytes

    def encode(self, more: str = "") -> bytes:
        """`more`: lines of other headers."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"{self.method} {self.target} HTTP/1.1\r\nHost: localhost\r\n{more}{lines}"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode("utf-8", "surrogateescape") + self.body


def mutated_body(request: Request, dice: random.Random) -> Request:
    """`request` with a broken body: its frame of HTTP stays whole, so that others can follow it."""
    return request._replace(body=b"".join(mutated([request.body], dice)))


LENGTHS = ("-1", "0", "1", "99999999999999999999", "0x10", "5, 5", "", "1e3", "67108865")


def mutated_head(raw: bytes, dice: random.Random) -> bytes:
    """The encoded request `raw`, broken as HTTP: nothing may follow it on its connection."""
    content = bytearray(raw)
    match dice.randrange(7):
        case 0:
            for _ in range(dice.randrange(1, 9)):
                content[dice.randrange(len(content))] = dice.randrange(256)
        case 1:
            del content[dice.randrange(len(content)) :]
        case 2:
            head, _, rest = raw.partition(b"Content-Length: ")
            rest = rest.partition(b"\r\n")[2]
            content = bytearray(b"%sContent-Length: %s\r\n%s" % (head, dice.choice(LENGTHS).encode(), rest))
        case 3:
            content = bytearray(raw.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nContent-Length: ", 1))
        case 4:
            length, times = dice.choice(((10, 1), (10, 300), (5000, 1), (5000, 1), (70_000, 1)))
            more = b"X-%d: %s\r\n" % (dice.randrange(9), b"x" * length)
            content = bytearray(raw.replace(b"Content-Length: ", more * times + b"Content-Length: ", 1))
        case 5:
            content[0:0] = dice.choice(
                (b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 9, b"\0")
            )
        case _:
            at = dice.randrange(len(content))
            content[at:at] = content[dice.randrange(len(content)) :][:2000]
    return bytes(content)


# --- torch's process groups ---

STORE_MAGIC = 0x3C85F7CE
"""What a client of torch's TCP store says first."""
STORE_QUESTION = b"\0" + STORE_MAGIC.to_bytes(4, "little") + b"\7"
"""How many keys a store has; it answers with eight bytes."""
STORE_NAMES = [b"world/0", b"data-0.1/0", b"weights/0/1", b"", b"x" * 3000, *(b"k%d" % i for i in range(40))]
"""Of keys: a few, so that a store that keeps what it is told does not grow by that."""
STREAM_COMMANDS = 15
"""In a stream to a store, about."""
LONG_LENGTHS = (2**31, 2**40, 2**63, 2**64 - 1)


def _sized(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def store_command(dice: random.Random) -> bytes:
    """A command to a TCP store, or nearly one: its number and arguments, as torch writes them."""
    key, value = _sized(dice.choice(STORE_NAMES)), _sized(dice.randbytes(dice.choice((0, 8, 40))))
    keys = dice.randrange(4)
    several = keys.to_bytes(8, "little") + b"".join(_sized(dice.choice(STORE_NAMES)) for _ in range(keys))
    number = dice.randbytes(8)
    arguments = dice.choice((b"", key, key + value, key + value + value, key + number, several, number[:4]))
    return bytes([dice.randrange(24)]) + arguments


def store_stream(dice: random.Random) -> bytes:
    """What a stranger says to a TCP store on one connection: commands, of which some are broken, after the greeting."""
    greeting = b"\0" + STORE_MAGIC.to_bytes(4, "little")
    commands = [store_command(dice) for _ in range(dice.randrange(1, 2 * STREAM_COMMANDS))]
    match dice.randrange(4):
        case 0:
            return b"".join(mutated([greeting, *commands], dice))
        case 1:  # as long as it says it is, it is not
            return greeting + b"\1" + dice.choice(LONG_LENGTHS).to_bytes(8, "little") + dice.randbytes(50)
        case 2:
            return dice.randbytes(dice.randrange(200))
        case _:
            return greeting + b"".join(commands)


def gloo_stream(dice: random.Random) -> bytes:
    """What a stranger says to gloo on one connection: the number of a rank that he is not, and something after it, or
    less than a number."""
    number = dice.choice((dice.randrange(4), dice.randrange(2**63))).to_bytes(8, "little")
    return (number + dice.randbytes(dice.choice((0, 40, 4000))))[dice.choice((0, 0, 0, 5)) :]


# --- strategies ---

HOSTILE: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, "", "\0", "x" * 3000, [], {}, [[]] * 500, {"a": {"a": {}}}]
)
"""Values that are wrong wherever they stand, or nearly."""
NAMES = ("rollout/0", "model_worker/0", "master/0", "gserver/0", "../../etc/passwd", "0" * 32, "http://127.0.0.1:1", "")


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of the type `kind` of a wire as plain lists, maps, numbers and texts, with something hostile here and
    there: in the place of any value, of a field that is missing, or of one that is too many."""
    return _of(msgspec.inspect.type_info(kind))


@st.composite
def _mostly(draw: st.DrawFn, usual: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> Any:
    return draw(seldom if draw(st.integers(0, 29)) == 7 else usual)


def _of(info: Any) -> st.SearchStrategy[Any]:
    return _mostly(_right(info), HOSTILE | st.builds(_nested, st.sampled_from((3, 400))))


def _right(info: Any) -> st.SearchStrategy[Any]:
    inspect = msgspec.inspect
    match info:
        case inspect.IntType():
            return _mostly(st.integers(0, 9), st.integers(-(2**63), 2**64 - 1))
        case inspect.FloatType():
            return st.floats()
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return st.one_of(st.sampled_from(NAMES), st.text(max_size=20))
        case inspect.BytesType():
            return st.binary(max_size=50)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.UnionType():
            return st.one_of(*map(_of, info.types))
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(_of(info.item_type), max_size=4)
        case inspect.TupleType():
            return st.tuples(*map(_of, info.item_types)).map(list)
        case inspect.DictType():
            return st.dictionaries(_right(info.key_type), _of(info.value_type), max_size=4)
        case inspect.StructType():
            return _struct(info)
        case _:
            return HOSTILE


def _struct(info: Any) -> st.SearchStrategy[Any]:
    tag = {info.tag_field: st.just(info.tag)} if info.tag_field else {}
    fields = {field.encode_name: _of(field.type) for field in info.fields}
    some = st.fixed_dictionaries({}, optional=tag | fields)
    more = st.fixed_dictionaries(tag | fields | {"_": HOSTILE})
    return _mostly(st.fixed_dictionaries(tag | fields), some | more)


def examples(strategy: st.SearchStrategy[Any], *, count: int, begin: int = 0) -> list[Any]:
    """`count` examples of `strategy`, the same for the same number `begin`."""
    found: list[Any] = []

    @seed(begin)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def encoded(values: Sequence[Any], encode: Callable[[Any], bytes]) -> list[bytes]:
    """Each of `values` by `encode`, but for those that it cannot say at all."""
    found = []
    for value in values:
        try:
            found.append(encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
    return found
