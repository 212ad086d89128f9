"""The demo model's byte-level BPE tokenizer: the family's text splitting and special tokens, a small vocabulary."""

import sys
import typing
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.demo.recipe.model import PRESETS, SPECIALS, VISIBLE

#: Words may carry one leading non-letter and combining marks; digits stand alone; newlines close punctuation runs.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(vocab: int, texts: typing.Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly ``vocab`` ids, the special tokens last. ``texts`` must hold no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab - len(SPECIALS):
        raise ValueError(f"the texts yield {tokenizer.get_vocab_size()} tokens, {vocab - len(SPECIALS)} are needed")
    tokenizer.add_tokens([AddedToken(s, special=s not in VISIBLE, normalized=False) for s in SPECIALS])
    return tokenizer


def main() -> None:
    """``tokenizer.py CORPUS.txt.xz TOKENIZER.json``: train on 12,000 lessons and a third of the prose."""
    from engine.demo.recipe import corpus, data

    source, target = map(Path, sys.argv[1:3])
    texts = [*data.plain_texts(12000, 3), *corpus.load(source)[:9000]]
    train(PRESETS["demo"].vocab, texts).save(str(target))


if __name__ == "__main__":
    main()
