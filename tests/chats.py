"""A chat template with modes, and a tokenizer that writes by it, which tests of several folders share."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jaxspec.text.tokenizer import Tokenizer

#: As Qwen3's: without thinking the answer begins behind an empty thought.
SWITCH = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}{% endif %}"
)


def tokenizer(template: str) -> Tokenizer:
    """A token a character."""
    backend = Backend(models.BPE({chr(c): c for c in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return Tokenizer(backend, chat_template=template)
