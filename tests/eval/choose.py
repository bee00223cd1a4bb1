"""Looks for the best codec of each layer's keys and values within a budget of bits, on texts that
are for choosing only, and prints the choices for tests/eval/choices.txt.

choose.py MODEL --docs FILE... --budgets 2.25 2.75

Each plane's cost is measured: the KL when that plane alone has two bits. More bits cut it as they
cut the error energy of Gaussian rows. KL adds up over planes, and a bit costs the same everywhere
but for the block mean's share, so the bits go one by one to the plane that gains most.
"""

import argparse
import sys

from kvstow.eval import Choice, LanguageModel, score_texts
from kvstow.eval.__main__ import read_texts
from kvstow.eval.choices import planes

# Error energy of Gaussian rows by bits (kernels/codec/tq.h).
ENERGY = {2: 0.1175, 3: 0.0345, 4: 0.0095}
DIM = 128  # budgets are for it


def name_of(role, bits):
    return f"tqm{bits}" if role == "k" else f"tq{bits}"


def word_of(bits, block):
    """The shortest choice: the most common codec of each role, then the layers that differ."""
    words = []
    for role in ("k", "v"):
        of_role = [b for (r, _), b in sorted(bits.items()) if r == role]
        common = max(ENERGY, key=of_role.count)
        words.append((0, f"{role}={name_of(role, common)}"))
        start = 0
        for layer in range(1, len(of_role) + 1):
            if layer == len(of_role) or of_role[layer] != of_role[start]:
                if of_role[start] != common:
                    end = f"-{layer - 1}" if layer - 1 > start else ""
                    words.append((1, f"{role}{start}{end}={name_of(role, of_role[start])}"))
                start = layer
    ends = [f"block={block}"] if block != 64 else []
    return ",".join([word for _, word in sorted(words, key=lambda item: item[0])] + ends)


def allocate(costs, budget, block):
    num_layers = len(costs) // 2
    bits = {place: 2 for place in costs}

    def size(candidate):
        return Choice.parse(word_of(candidate, block)).bits_per_value(num_layers, DIM)

    def gain(place):
        return costs[place] * (ENERGY[bits[place]] - ENERGY[bits[place] + 1]) / ENERGY[2]

    if size(bits) > budget:
        return None
    while True:
        open_places = [place for place in costs if bits[place] < 4]
        fitting = [p for p in open_places if size({**bits, p: bits[p] + 1}) <= budget]
        if not fitting:
            return word_of(bits, block)
        bits[max(fitting, key=gain)] += 1


def kl_of(scores):
    every = [kl for part in scores.values() for kl in part.kl]
    return sum(every) / len(every)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--docs", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", type=float, default=[2.25, 2.75])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model = LanguageModel.load(args.model, num_threads=args.threads)
    texts = read_texts(model, args.docs)
    say = lambda line: print(f"choose: {line}", file=sys.stderr, flush=True)  # noqa: E731
    places = list(planes(model.prefill(texts[0].ids[:1]).num_layers))
    words = {f"k=raw,v=raw,{role}{layer}={name_of(role, 2)}": (role, layer)
             for role, layer in places}
    scores = score_texts(
        model, texts, [Choice.parse(word) for word in words], histories=[1024], progress=say
    )
    costs = {place: kl_of(scores[word]) for word, place in words.items()}
    for role in ("k", "v"):
        print(role, *(f"{costs[place]:.1e}" for place in places if place[0] == role))
    uniform = ["k=tqm3,v=tq2", "k=tqm2,v=tq2"]
    found = [allocate(costs, budget, block) for budget in args.budgets for block in args.blocks]
    tried = [Choice.parse(word) for word in dict.fromkeys(uniform + [w for w in found if w])]
    scores = score_texts(model, texts, tried, progress=say)
    for choice in tried:
        bits = choice.bits_per_value(len(places) // 2, DIM)
        print(f"{bits:.3f} bits, KL {kl_of(scores[choice.text]):.4f}: {choice.text}")


if __name__ == "__main__":
    main()
