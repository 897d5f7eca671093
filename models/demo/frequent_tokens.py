"""Write FR-Spec's token map (arXiv 2502.14856): the most frequent tokens of the standard library.

python -m models.demo.frequent_tokens --size 3072 --output models/demo/token_map.safetensors
"""

from __future__ import annotations

import argparse
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from models.demo.held_out import held_out_files

MAX_FILES = 1500


def write_token_map(path: Path, target: Path, size: int) -> None:
    """Write ``token_map`` (int64 [size]) to a safetensors file, most frequent ids first.

    The ids are of ``target``'s tokenizer. They are counted over files of the standard library that
    the demo model's benchmarks do not use.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    held_out = {file.resolve() for file in held_out_files()}
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(library.rglob("*.py"))
        if file.resolve() not in held_out and "site-packages" not in file.parts
    ][:MAX_FILES]
    counts: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch([file.read_text(errors="replace") for file in files]):
        counts.update(encoding.ids)
    # Tokens that do not occur fill the rest, in the order of their ids.
    ids = [token for token, _ in counts.most_common(size)]
    seen = set(ids)
    ids += [token for token in range(tokenizer.get_vocab_size()) if token not in seen][: size - len(ids)]
    save_file({"token_map": np.array(ids, np.int64)}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(__file__).parent / "target")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    write_token_map(options.output, options.target, options.size)


if __name__ == "__main__":
    main()
