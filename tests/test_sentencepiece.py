"""tokenizer.model without the package sentencepiece: its ids (release 0.2.3) are recorded here."""

from __future__ import annotations

import base64
import io
import json
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from jaxspec.text import sentencepiece
from jaxspec.text.grammar import GrammarCompiler, GrammarSpec
from jaxspec.text.sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNIGRAM, UNKNOWN, UNUSED, USER_DEFINED
from jaxspec.text.tokenizer import IncrementalDetokenizer, Tokenizer
from serve.vllm.checkpoint_files import tokenizer_archive

#: ﬁ is fi, Ａ and A are a, tabs and line breaks are spaces, and U+200B is nothing; as sentencepiece compiled it.
CHARSMAP = zlib.decompress(base64.b85decode(
    "c-ke?1*{iT6bIn@9xw(&8gx=mr9qK+fHa~ox)Bjk=|?Lq2=7TtcQ+^?p$JH+ba!_Mj2Mk562kYFyM6ne?cCkn?VcMFhY(^yNR}*w<Viw^3L##^$H"
    "zp6p$aR0afl8HuY{0PJv&PXiDU|mRHP&gsYyp#GLW8E$;kR0(cv|jiPv#N$V@h}^2W<6gtvH;9AqaKImttA@{yOf$xi{^p&;*4m_o!-gklusJ&IG3"
    "5|pMCWhp~>%29#$`H&B&L`5n`_QXbos<H~zsYXp|P@7uRr4IF}$44~aV;b@ajrf$td`1(#;B%VMlom9n6)lOQHEn4_d)m>F4tz-`I`b7>=|Xq9(UT"
    "tZ;%mO4H+|_tLgbO@$F~fiKZ6*^5C$`p?-<T7MlyoYjAATf7|%E+GJ(lVVk%RZ&NOB+gW1etE_0aAJbvJN7P5dJS;P_+vy7$u%uoEna#pf}Us=T(R"
    "<n+^{1%x>{@`~uvVqNPVk=wN&Ng<kgWc?6FMHU}J`Qq#!yMu$M>x(gPI7|NoZ>8JIL|pQa)C?y$rUbhl{+b-!gYBq(pw)DZpd5QjP$t8J?`>=`#j"
    "_?{^4)_<q=PK%rl<yod3fApRc?jY#A3`03Yg!Dg"
))  # fmt: skip
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256)]
MERGED = ["▁a", "ab", "▁▁", "abc", "▁▁▁▁", "bc", "aa", "▁abc", "aaa", "cab", "▁b", "▁", *"abcdé"]
#: The likeliest first.
LIKELY = ["▁", *"abcfi", "▁a", "▁b", "abc", "▁fi", "ab", "bc", "aa", "▁abc", "cab", "é"]
TEXTS = [
    "", " ", "   ", "a", " a", "abc abc", "  abc   cab ", "aaaaaaa", "abcabcab\ncab", "a é🙂\u200bb", "ﬁ Ａ A\tfi",
    "▁a<0x", "ddd def", "x=[a, b]\n    abc    bc\n", "好 b 好好 b",
]  # fmt: skip


def build(pieces: list[tuple[str, float, int]], kind: int, *, charsmap: bytes = b"", byte_fallback: bool = False,
          prefix: bool = True, squeeze: bool = False) -> Any:  # fmt: skip
    """A ModelProto."""
    proto: Any = sentencepiece.model_proto()()
    for piece, score, sort in pieces:
        proto.pieces.add(piece=piece, score=score, type=sort)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = kind, byte_fallback
    spec = proto.normalizer_spec
    spec.precompiled_charsmap, spec.add_dummy_prefix, spec.remove_extra_whitespaces = charsmap, prefix, squeeze
    return proto


def llama() -> Any:
    """As Llama 2's."""
    pieces = [(w, -float(i), NORMAL) for i, w in enumerate(MERGED)]
    return build([*SPECIAL, *BYTES, *pieces], BPE, byte_fallback=True)


def gemma() -> Any:
    """No space in front; runs of spaces and line breaks are the user's."""
    user = [(w, 0.0, USER_DEFINED) for w in ("\n", "▁▁▁", "def")]
    pieces = [(w, -float(i), NORMAL) for i, w in enumerate(MERGED)]
    return build([*SPECIAL, *user, *BYTES, *pieces], BPE, byte_fallback=True, prefix=False)


def t5() -> Any:
    """Unigram, normalized, and without bytes: what is not known is one token."""
    pieces = [(w, -3.0 - 0.37 * s, NORMAL) for s, w in enumerate(LIKELY)]
    return build([*SPECIAL, *pieces], UNIGRAM, charsmap=CHARSMAP, squeeze=True)


def unigram_bytes() -> Any:
    pieces = [(w, -3.0 - 0.37 * s, NORMAL) for s, w in enumerate(LIKELY)]
    return build([*SPECIAL, *BYTES, *pieces], UNIGRAM, byte_fallback=True)


KINDS = {f.__name__: f for f in (llama, gemma, t5, unigram_bytes)}
#: By kind, the ids of each of TEXTS.
RECORDED: dict[str, list[list[int]]] = {
    "llama": [[], [261], [263], [259], [270, 259], [266, 266], [261, 266, 261, 270, 268, 270], [259, 265, 265, 265],
        [266, 262, 260, 13, 268], [259, 270, 275, 243, 162, 156, 133, 229, 131, 142, 272], [270, 242, 175, 132, 270,
        242, 191, 164, 270, 68, 12, 105, 108], [270, 259, 63, 51, 123], [270, 274, 274, 274, 270, 274, 104, 105], [270,
        123, 64, 94, 271, 47, 269, 96, 13, 261, 270, 266, 263, 264, 13], [270, 232, 168, 192, 269, 270, 232, 168, 192,
        232, 168, 192, 269]],
    "gemma": [[], [273], [4], [274], [262], [265, 269], [273, 269, 4, 271, 273], [268, 268, 270], [265, 265, 263, 3,
        271], [274, 273, 278, 246, 165, 159, 136, 232, 134, 145, 275], [245, 178, 135, 273, 245, 194, 167, 273, 71, 15,
        108, 111], [262, 66, 54, 126], [277, 277, 277, 273, 5], [126, 67, 97, 274, 50, 272, 99, 3, 4, 269, 4, 273, 267,
        3], [235, 171, 195, 272, 273, 235, 171, 195, 235, 171, 195, 272]],
    "t5": [[], [], [], [9], [9], [16, 16], [16, 3, 17], [9, 4, 4, 4, 4, 4, 4], [16, 11, 13, 3, 17], [9, 3, 18, 0, 5],
        [12, 3, 0, 9, 12], [3, 9, 0], [3, 0, 3, 0, 7], [3, 0, 4, 0, 10, 0, 16, 10, 6], [3, 0, 10, 3, 0, 10]],
    "unigram_bytes": [[], [259, 259], [259, 259, 259, 259], [265], [259, 265], [272, 272], [259, 259, 272, 259, 259,
        259, 273, 259], [265, 260, 260, 260, 260, 260, 260], [272, 267, 269, 13, 273], [265, 259, 274, 243, 162, 156,
        133, 229, 131, 142, 261], [259, 242, 175, 132, 259, 242, 191, 164, 259, 68, 12, 263, 264], [259, 265, 63, 51,
        123], [259, 103, 103, 103, 259, 103, 104, 263], [259, 123, 64, 94, 260, 47, 266, 96, 13, 259, 259, 259, 272,
        259, 259, 259, 266, 262, 13], [259, 232, 168, 192, 266, 259, 232, 168, 192, 232, 168, 192, 266]],
}  # fmt: skip


def directory(path: Path, proto: Any, **files: Any) -> Path:
    (path / "tokenizer.model").write_bytes(proto.SerializeToString())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, kind: str) -> None:
    tok = Tokenizer.from_directory(directory(tmp_path, KINDS[kind]()))
    assert (tok.bos_token_id, tok.eos_token_ids, tok.adds_bos) == (1, (2,), True)
    assert tok.encode("a")[0] == 1
    assert [tok.encode(text, add_special_tokens=False) for text in TEXTS] == RECORDED[kind]
    assert tok.vocab_size == len(KINDS[kind]().pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_back_and_stream_as_they_are_decoded(tmp_path: Path, kind: str) -> None:
    tok = Tokenizer.from_directory(directory(tmp_path, KINDS[kind]()))
    for text in TEXTS if kind != "t5" else []:
        assert tok.decode(tok.encode(text)) == text.replace("▁", " ")
    rng = random.Random(0)
    for _ in range(200):
        ids = [i for text in rng.sample(TEXTS, 3) for i in tok.encode(text) if rng.random() < 0.9]
        ids += rng.choices(range(tok.vocab_size + 2), k=5)
        for start, skip in ((0, True), (1, False), (2, True)):
            stream = IncrementalDetokenizer(tok, ids[:start], skip_special_tokens=skip)
            before = tok.decode(ids[:start], skip_special_tokens=skip).rstrip("\ufffd")
            text = "".join(stream.feed(i) for i in ids[start:]) + stream.flush()
            assert before + text == tok.decode(ids, skip_special_tokens=skip)


def test_bytes_of_no_character_leave_their_neighbours_alone(tmp_path: Path) -> None:
    tok = Tokenizer.from_directory(directory(tmp_path, llama()))
    ids = [i + 3 for i in (0x80, *"🙂".encode(), 0xC3, 0xF0, 0x9F)]
    assert tok.decode(ids) == "\ufffd🙂\ufffd\ufffd\ufffd"
    # Behind what has no text a space is no text's first.
    stream, (word,) = IncrementalDetokenizer(tok), tok.encode("a", add_special_tokens=False)
    assert [stream.feed(i) for i in (1, word, 2, word)] == ["", "a", "", " a"]


def test_the_files_beside_it_have_their_say(tmp_path: Path) -> None:
    count = len(llama().pieces)
    settings: dict[str, Any] = dict(
        bos_token=None, eos_token="<|end|>", add_bos_token=False,
        chat_template="{{ messages[0].content }}{{ eos_token }}",
        added_tokens_decoder={
            "2": dict(content="</s>", special=True), str(count): dict(content="<|end|>", special=True),
            str(count + 1): dict(content="<tool>", special=False),
        },
    )  # fmt: skip
    tok = Tokenizer.from_directory(directory(tmp_path, llama(), tokenizer_config=settings, config=dict(bos_token_id=1)))
    assert (tok.bos_token_id, tok.eos_token_ids, tok.adds_bos) == (1, (count,), False)
    space_a = tok.encode("a")
    ids = tok.encode(tok.apply_chat_template([{"role": "user", "content": "a<tool>a"}]))
    assert ids == [*space_a, count + 1, *space_a, count] and tok.decode(ids) == "a<tool> a"

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False, "add_bos_token": False}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": count}))
    tok = Tokenizer.from_directory(tmp_path)
    a = tok.encode("<|end|>a")[1:]
    assert tok.encode("a<|end|>a") == [*space_a, count, *a] and a != space_a

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False, "add_bos_token": False}))
    assert Tokenizer.from_directory(tmp_path).encode("a") == a
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": count + 7}))
    with pytest.raises(ValueError, match=rf"'<\|end\|>' must have the id {count}, .* got {count + 7}"):
        Tokenizer.from_directory(tmp_path)


def test_gateways_get_it_as_tokenizer_json(tmp_path: Path) -> None:
    assert tokenizer_archive(tmp_path) is None
    made = tokenizer_archive(directory(tmp_path, llama(), config={}))
    assert made is not None
    with zipfile.ZipFile(io.BytesIO(made[0])) as archive:
        assert sorted(archive.namelist()) == ["config.json", "tokenizer.json"]
        backend = Backend.from_str(archive.read("tokenizer.json").decode())
    assert [backend.encode(text).ids for text in TEXTS] == RECORDED["llama"]


def test_grammars_know_its_tokens(tmp_path: Path) -> None:
    tok = Tokenizer.from_directory(directory(tmp_path, llama()))
    root = GrammarCompiler(tok, tok.vocab_size).compile(GrammarSpec("regex", "[a-c]+")).matcher().root
    allowed = [i for i in range(tok.vocab_size) if root[i // 32] >> i % 32 & 1]
    assert sorted(tok.decode([i]) for i in allowed) == sorted([*"abcabc", "ab", "abc", "bc", "aa", "aaa", "cab"])


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    def refused(proto: Any, match: str) -> None:
        with pytest.raises(ValueError, match=f"tokenizer.model: .*{match}"):
            Tokenizer.from_directory(directory(tmp_path, proto))

    refused(build([("<unk>", 0.0, UNKNOWN)], 3), "unigram or bpe, got word")
    refused(build([], BPE), "1 unknown token, got 0")
    refused(build([*SPECIAL, ("a", 0.0, NORMAL)] * 2, BPE), "got 2")
    refused(build([*SPECIAL, ("a", 0.0, NORMAL), ("a", 0.0, NORMAL)], BPE), "differ from each other")
    refused(build([*SPECIAL, ("a", 0.0, UNUSED)], BPE), "unused pieces")
    refused(build(SPECIAL, BPE, byte_fallback=True), "256 bytes, got 0")
    proto = llama()
    proto.trainer_spec.treat_whitespace_as_suffix = True
    refused(proto, "treat_whitespace_as_suffix is not supported")
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 9)
    with pytest.raises(ValueError, match="tokenizer.model: not a SentencePiece model"):
        Tokenizer.from_directory(tmp_path)
