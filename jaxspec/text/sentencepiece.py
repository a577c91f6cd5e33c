"""SentencePiece models (tokenizer.model) as tokenizers of the `tokenizers` library.

Owns the few fields that are read of the file's ModelProto (sentencepiece_model.proto of google/sentencepiece), and what
its settings mean in the other library's terms, where transformers' converters have shown the way. The package
sentencepiece is not needed. Must not know what a directory holds beside the file.

Text is cut as SentencePiece cuts it, but that tokens of the kind "control" are found in a text, as in every
tokenizer.json; that after a special token within a text the space in front comes again, as Llama's tokenizer in
transformers has it unless its `legacy` is false; and that a Unigram model reads a literal "<0x41>" as that byte.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

#: How a piece writes a space.
SPACE = "\u2581"
#: ModelProto.SentencePiece.Type, and TrainerSpec.ModelType by what they are called.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_MODEL_TYPES = {UNIGRAM: "unigram", BPE: "bpe", 3: "word", 4: "char"}

_Kind = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "jaxspec.sentencepiece"
#: Fields by message: (name, number, type, default). Enumerations are integers on the wire.
_FIELDS: dict[str, tuple[tuple[str, int, int, str | None], ...]] = {
    "SentencePiece": (
        ("piece", 1, _Kind.TYPE_STRING, None),
        ("score", 2, _Kind.TYPE_FLOAT, None),
        ("type", 3, _Kind.TYPE_INT32, str(NORMAL)),
    ),
    "TrainerSpec": (
        ("model_type", 3, _Kind.TYPE_INT32, str(UNIGRAM)),
        ("treat_whitespace_as_suffix", 24, _Kind.TYPE_BOOL, "false"),
        ("byte_fallback", 35, _Kind.TYPE_BOOL, "false"),
        ("bos_piece", 46, _Kind.TYPE_STRING, "<s>"),
        ("eos_piece", 47, _Kind.TYPE_STRING, "</s>"),
    ),
    "NormalizerSpec": (
        ("precompiled_charsmap", 2, _Kind.TYPE_BYTES, None),
        ("add_dummy_prefix", 3, _Kind.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, _Kind.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, _Kind.TYPE_BOOL, "true"),
    ),
}
#: Fields of ModelProto that are messages: (name, number, message, repeated).
_PARTS = (
    ("pieces", 1, "SentencePiece", True),
    ("trainer_spec", 2, "TrainerSpec", False),
    ("normalizer_spec", 3, "NormalizerSpec", False),
    ("denormalizer_spec", 5, "NormalizerSpec", False),
)


@functools.cache
def model_proto() -> type[Message]:
    """The class of ModelProto: the fields that are read here; others are kept as they came."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxspec/sentencepiece.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            one = message.field.add(name=field, number=number, type=kind, label=_Kind.LABEL_OPTIONAL)  # pyright: ignore
            if default is not None:
                one.default_value = default
    model = file.message_type.add(name="ModelProto")
    for field, number, name, repeated in _PARTS:
        label = _Kind.LABEL_REPEATED if repeated else _Kind.LABEL_OPTIONAL
        type_name = f".{_PACKAGE}.{name}"
        model.field.add(name=field, number=number, type=_Kind.TYPE_MESSAGE, label=label, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto"))


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """What a tokenizer.model says.

    Attributes:
      backend: the tokenizer, without BOS in front.
      bos_token: what begins a text; None if the model has no such control token. eos_token: what ends it, likewise.
    """

    backend: Backend
    bos_token: str | None
    eos_token: str | None


def read(
    data: bytes,
    *,
    add_dummy_prefix: bool | None = None,
    legacy: bool = True,
    added: Sequence[tuple[int, AddedToken]] = (),
) -> SentencePieceModel:
    """The tokenizer that a serialized ModelProto describes.

    Args:
      add_dummy_prefix: whether a space is put in front of a text; None: as the model says.
      legacy: whether one is put behind every special token in it too, as `legacy` of transformers' Llama tokenizer.
      added: (id, token) of tokens that the model does not know, or knows otherwise; ids go on where the model's end.

    Raises:
      ValueError: not such a model, or one of a kind or with a setting that cannot be honoured.
    """
    proto: Any = model_proto()()
    try:
        proto.ParseFromString(data)
    except DecodeError as e:
        raise ValueError(f"not a SentencePiece model: {e}") from e
    _refuse_unsupported(proto)
    spec = proto.normalizer_spec
    prefix = spec.add_dummy_prefix if add_dummy_prefix is None else add_dummy_prefix
    backend = Backend(_bpe(proto, prefix) if proto.trainer_spec.model_type == BPE else _unigram(proto))
    steps = _cleaning(spec)
    if prefix and legacy:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if prefix and not legacy:
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix or spec.remove_extra_whitespaces:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    _add_tokens(backend, proto, prefix, added)
    control = {piece.piece for piece in proto.pieces if piece.type == CONTROL}
    bos, eos = (
        name if name in control else None for name in (proto.trainer_spec.bos_piece, proto.trainer_spec.eos_piece)
    )
    return SentencePieceModel(backend, bos, eos)


def _refuse_unsupported(proto: Any) -> None:
    """Raises ValueError for what cannot be honoured."""
    kinds = [piece.type for piece in proto.pieces]
    if kinds.count(UNKNOWN) != 1:
        raise ValueError(f"a SentencePiece model must have 1 unknown token, got {kinds.count(UNKNOWN)}")
    if len({piece.piece for piece in proto.pieces}) < len(kinds):
        raise ValueError("the pieces of a SentencePiece model must differ from each other")
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (UNIGRAM, BPE):
        kind = _MODEL_TYPES.get(trainer.model_type, trainer.model_type)
        raise ValueError(f"a SentencePiece model must be of the type unigram or bpe, got {kind}")
    if trainer.byte_fallback and kinds.count(BYTE) != 256:
        raise ValueError(f"a SentencePiece model with byte_fallback must have 256 bytes, got {kinds.count(BYTE)}")
    for name, unsupported in {
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces=False": not spec.escape_whitespaces,
        "unused pieces": UNUSED in kinds,
        "a denormalizer": bool(proto.denormalizer_spec.precompiled_charsmap),
    }.items():
        if unsupported:
            raise ValueError(f"a SentencePiece model with {name} is not supported")


def _bpe(proto: Any, prefix: bool) -> models.BPE:
    """Merges are all the ways to put a piece together, of the best piece first."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    # Only these take part in merges: control tokens and bytes are never put together, and special tokens are cut out
    # of the text before.
    parts = {p.piece: p.score for p in proto.pieces if p.type == NORMAL or _is_merged(p, prefix)}
    merges: list[tuple[float, int, int, str, str]] = []
    for whole, score in parts.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in parts and right in parts:
                merges.append((-score, ids[left], ids[right], left, right))
    unknown = next(piece.piece for piece in proto.pieces if piece.type == UNKNOWN)
    return models.BPE(
        ids, [merge[3:] for merge in sorted(merges)], unk_token=unknown, fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )  # fmt: skip


def _unigram(proto: Any) -> models.Unigram:
    # What is not found by its score must not change the unknown token's, which depends on the lowest.
    lowest = min((piece.score for piece in proto.pieces if piece.type == NORMAL), default=0.0)
    scores = [(p.piece, p.score if p.type in (NORMAL, USER_DEFINED) else lowest) for p in proto.pieces]
    unknown = next(i for i, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    return models.Unigram(scores, unknown, proto.trainer_spec.byte_fallback)


def _cleaning(spec: Any) -> list[normalizers.Normalizer]:
    """What happens to a text before the space in front of it."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps


def _is_merged(piece: Any, prefix: bool) -> bool:
    """Whether a user-defined piece is found by merges only.

    Added tokens that hold spaces would be looked for as a text of their own, with the space in front of one.
    """
    return piece.type == USER_DEFINED and prefix and SPACE in piece.piece


def _add_tokens(backend: Backend, proto: Any, prefix: bool, added: Sequence[tuple[int, AddedToken]]) -> None:
    tokens: dict[int, AddedToken] = {}
    for i, piece in enumerate(proto.pieces):
        if piece.type in (UNKNOWN, CONTROL):
            tokens[i] = AddedToken(piece.piece, special=True, normalized=False)
        elif piece.type == USER_DEFINED and not _is_merged(piece, prefix):
            tokens[i] = AddedToken(piece.piece, special=False, normalized=SPACE in piece.piece)
    tokens.update(added)
    for i, token in sorted(tokens.items()):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != i:
            raise ValueError(
                f"the added token {token.content!r} must have the id {backend.token_to_id(token.content)}, the next "
                f"after the model's {len(proto.pieces)} pieces and those added before, got {i}"
            )
