"""Looks for the best codec of each layer's keys and values within a budget of bits, on texts that
are for choosing only. Writes a plan for each budget and prints what it costs on these texts.

choose.py MODEL --docs tests/data/eval/choose/{prose,code}.txt --blocks 128 --out tests/eval/plans

What a plane costs is measured: the KL when that plane alone has two bits. More bits cut it as they
cut the error energy of Gaussian rows. KL adds up over planes, so each step goes to the plane that
gains most for its bits. Some layers' keys do better with their mean than without, some not.
"""

import argparse
import itertools
import pathlib
import sys

from kvstow.codecs import PlaneCodec
from kvstow.eval import Choice, LanguageModel, score_texts
from kvstow.eval.__main__ import read_texts
from kvstow.eval.choices import planes

DIM = 128  # budgets are for it
MEASURED = {"k": ("tq2", "tqm2"), "v": ("tq2",)}
# What follows for more bits: the error energy of Gaussian rows, over that at two.
ENERGY = {2: 1.0, 3: 0.0345 / 0.1175, 4: 0.0095 / 0.1175}


def all_costs(measured):
    """KL by place and codec, of (role, layer, codec) measured alone."""
    costs = {}
    for (role, layer, codec), kl in measured.items():
        costs.setdefault((role, layer), {})[codec] = kl
    for options in costs.values():
        for codec, kl in list(options.items()):
            family = codec.rstrip("2")
            options.update({f"{family}{bits}": kl * share for bits, share in ENERGY.items()})
    return costs


def word_and_plan(chosen, budget, block, folder):
    """The most common codec of each role as a word, and the layers that differ as a plan."""
    pair, lines = [], []
    for role in ("k", "v"):
        codecs = [codec for (r, _), codec in sorted(chosen.items()) if r == role]
        common = max(sorted(set(codecs)), key=codecs.count)
        pair.append(f"{role}={common}")
        lines += [
            f"layer{layer}.{role}={codec}"
            for layer, codec in enumerate(codecs)
            if codec != common
        ]
    path = folder / f"{budget:g}_bits_{block}.txt"
    word = ",".join(pair + ([f"block={block}"] if block != 64 else []) + [f"plan={path}"])
    text = f"# SmolLM2-135M at {budget:g} bits, blocks of {block} tokens; for {','.join(pair)}\n"
    return word, path, text + "\n".join(lines) + "\n"


def allocate(costs, budget, block):
    """The chosen codecs, and the KL that they should cost; None where two bits are too many."""

    def bits(place, codec):
        return PlaneCodec(codec, place[0], DIM, tokens_per_block=block).bits_per_value

    sizes = {place: {codec: bits(place, codec) for codec in costs[place]} for place in costs}
    chosen = {place: min(sizes[place], key=sizes[place].get) for place in costs}
    left = budget * len(costs) - sum(sizes[place][codec] for place, codec in chosen.items())
    while left >= 0:
        best = None
        for place, codec in chosen.items():
            for other, size in sizes[place].items():
                step = size - sizes[place][codec]
                if 0 < step <= left:
                    gain = (costs[place][codec] - costs[place][other]) / step
                    best = max(best or (0,), (gain, place, other))
        if best is None or best[0] <= 0:
            break
        _, place, other = best
        left -= sizes[place][other] - sizes[place][chosen[place]]
        chosen[place] = other
    if left < 0:
        return None
    return chosen, sum(costs[place][codec] for place, codec in chosen.items())


def kl_of(scores):
    every = [kl for part in scores.values() for kl in part.kl]
    return sum(every) / len(every)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--docs", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", type=float, default=[2.25, 2.75])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--history", type=int, default=512, help="of what is measured alone")
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    args = parser.parse_args()
    model = LanguageModel.load(args.model, num_threads=args.threads)
    texts = read_texts(model, args.docs)

    def score(words, **options):
        choices = [Choice.parse(word) for word in words]
        scores = score_texts(
            model, texts, choices, progress=lambda line: print(line, file=sys.stderr), **options
        )
        return {word: kl_of(scores[word]) for word in words}

    num_layers = model.prefill(texts[0].ids[:1]).num_layers
    alone = {
        f"raw,layer{layer}.{role}={codec}": (role, layer, codec)
        for role, layer in planes(num_layers)
        for codec in MEASURED[role]
    }
    found = score(list(alone), histories=[args.history], num_scored=args.scored)
    costs = all_costs({alone[word]: kl for word, kl in found.items()})
    words = ["k=tqm3,v=tq2", "k=tqm2,v=tq2"]
    for budget, block in itertools.product(args.budgets, args.blocks):
        found = allocate(costs, budget, block)
        if found:
            word, path, text = word_and_plan(found[0], budget, block, args.out)
            path.write_text(text)
            words.append(word)
    for word, kl in score(list(dict.fromkeys(words))).items():
        bits = Choice.parse(word).bits_per_value(num_layers, DIM)
        print(f"{bits:.3f} bits, KL {kl:.4f}: {word}")


if __name__ == "__main__":
    main()
