"""The demo checkpoint's tokenizer: a byte-level BPE over a page of text of our own."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
NOISE = "<｜draft▁noise｜>"
IMAGE = "<｜deepseek_image｜>"
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    NOISE,
    IMAGE,
)

# Words in several cases, accents and widths, so that the Engram token map has something to fold.
_TEXT = """\
A sparse model looks at few places and remembers many. The indexer reads every key once, gives each a score, and keeps
the best. Attention then reads only the rows that were kept, and the window of the newest tokens beside them.
THE INDEXER READS EVERY KEY ONCE. The Window Of The Newest Tokens. Attention, attention, ATTENTION.

When two tokens share a row, the row is a mixture of both: the gate decides how much of each. When a row stands for one
token alone, nothing is mixed. Some layers own their rows, others borrow them; some layers choose anew, others take the
choice of a layer before. A layer that makes candidates chooses blocks, and the layers after it choose inside them.

Once upon a time there was a small model that had read only one page. It was asked to write a story, and it wrote about
the page. "Is that all?" asked the reader. "That is all I know," said the model, "but I can say it in many ways."
So the model said it again, and again, and every time the words came out in another order. The reader laughed and went
to fetch another page. In the evening the model had read two pages, and in the morning it had read a hundred.

def gather(rows, indices):
    return [rows[i] for i in indices if i >= 0]

for token in range(0, 128):
    print(token, gather(rows, [token - 1, token, token + 1]))

Numbers: 0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024 2048 4096. Units: bytes, tokens, rows, pages, blocks, heads.
Café, café, CAFÉ, naïve, Naive, façade, Façade, élan, Élan, über, Über, señor, Señor, coöperate, Ångström, piñata.
Ｗｉｄｅ letters and wide letters, ｔｏｋｅｎ and token. Eins, zwei, drei; un, deux, trois; uno, dos, tres.
你好，世界。模型写字。今天的天气很好。

    Four spaces begin this line,\tand a tab stands in it.
"""


def demo_tokenizer() -> Tokenizer:
    """The tokenizer: VOCABULARY tokens, SPECIAL_TOKENS first in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    return tokenizer
