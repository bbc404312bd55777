"""join.py: the stories in long documents, forty to each, as in a book: no document fits a row.

What fills gaps in short documents need not do so in long ones: this text shows it.

    python -m lab.join
    python train.py --objective=fim --data=joined.txt --tokenizer=bpe:1024 --out_dir=out/joined
    python -m lab.skills --out_dir=out/joined
"""

import itertools
import sys

import stories
from tokenizer import EOT_TEXT

STORIES_IN_ONE = 40


def main(path: str = "joined.txt") -> None:
    told = (text for text, _ in stories.documents(stories.DEFAULT_SIZE))
    with open(path, "w") as f:
        while document := "".join(itertools.islice(told, STORIES_IN_ONE)):
            f.write(document + EOT_TEXT + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
