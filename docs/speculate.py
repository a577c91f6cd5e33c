"""Speculative decoding in sixty lines of NumPy: two toy models, one round, and the same output as plain decoding.

Run it: `python docs/speculate.py`. docs/how-it-works.md says what the engine does beyond it.
"""

import numpy as np

VOCAB, SEED, TEMPERATURE, DEPTH = 50, 7, 0.8, 4
_rng = np.random.default_rng(0)
BY_LAST = 3.0 * _rng.normal(size=(VOCAB, VOCAB))  # what the last token says about the next one
BY_LAST_BUT_ONE = 1.0 * _rng.normal(size=(VOCAB, VOCAB))  # and the token before it


def target(tokens):
    """The large model: logits [len(tokens), VOCAB]; row i is about the token after tokens[i]. One forward pass."""
    return BY_LAST[tokens] + BY_LAST_BUT_ONE[tokens[:1] + tokens[:-1]]


def drafter(tokens):
    """The cheap model, [VOCAB]: the next token's logits from the last token alone. Often right, not always."""
    return BY_LAST[tokens[-1]]


def draw(logits, position):
    """A sample of softmax(logits / TEMPERATURE) by the Gumbel-max trick: add noise, take the largest.

    The noise depends on the seed and the token's position and on nothing else. So whoever draws the token at a position
    (plain decoding, the drafter, verification) uses the same noise. Greedy decoding is the case without noise.
    """
    return int(np.argmax(logits / TEMPERATURE + np.random.default_rng((SEED, position)).gumbel(size=VOCAB)))


def decode(tokens, count):
    """Plain decoding: one forward pass of the target for every token."""
    for _ in range(count):
        tokens = [*tokens, draw(target(tokens)[-1], len(tokens))]
    return tokens


def speculate(tokens):
    """One round: the text (list of token ids) with 1 to DEPTH + 1 new tokens, for one forward pass of the target."""
    drafts = list(tokens)
    for _ in range(DEPTH):  # Draft: the cheap model writes ahead, one token after the other.
        drafts.append(draw(drafter(drafts), len(drafts)))
    logits = target(drafts)  # Verify: one pass gives the target's logits at the root (the last token) and every draft.
    new = []
    for position in range(len(tokens), len(drafts) + 1):  # The target draws its own token; only those are ever kept.
        new.append(draw(logits[position - 1], position))
        if position == len(drafts) or new[-1] != drafts[position]:
            break  # All drafts accepted, or the first that differs: the target's own token, the bonus, ends the round.
    return tokens + new


if __name__ == "__main__":
    text, rounds = [1], 0
    while len(text) <= 200:
        text, rounds = speculate(text), rounds + 1
    print(f"{(len(text) - 1) / rounds:.2f} tokens per round; as plain decoding: {text == decode([1], len(text) - 1)}")
