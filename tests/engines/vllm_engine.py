"""One vLLM engine process: serves prompts, one line of JSON per event on standard output.

vllm_engine.py MODEL PROMPTS TOKENS [--target T --codec C ...] [--one-by-one]

Events: {"event": "ready"}, {"event": "start", "prompt": i}, {"event": "done", "prompt": i,
"tokens": [...], "cached": n, "seconds": s}, {"event": "end"}. With --one-by-one a prompt is begun
when a line arrives on standard input.
"""

import argparse
import json
import os
import sys
import time

os.environ.update(
    OMP_WAIT_POLICY="passive",
    GOMP_SPINCOUNT="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)


def say(**event):
    print(json.dumps(event), file=EVENTS, flush=True)


class Waited:
    """Seconds that the engine spent in the connector's hooks, and that requests waited for the
    answer of a lookup."""

    def __init__(self):
        self.seconds = 0.0
        self.asked = {}

    def wrap(self, connector):
        for name, hook in list(vars(connector).items()):
            if callable(hook) and not name.startswith("_"):
                setattr(connector, name, self._timed(hook))
        ask = connector.get_num_new_matched_tokens

        def timed_ask(me, request, *args):
            first = self.asked.setdefault(request.request_id, time.monotonic())
            answer = ask(me, request, *args)
            if answer[0] is not None:
                self.seconds += time.monotonic() - first
            return answer

        connector.get_num_new_matched_tokens = timed_ask

    def _timed(self, hook):
        def timed(*args, **kwargs):
            start = time.monotonic()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds += time.monotonic() - start

        return timed


WAITED = Waited()


def result(i, output, seconds, waited=0.0):
    say(
        event="done",
        waited=round(waited, 3),
        prompt=i,
        tokens=list(output.outputs[0].token_ids),
        prompt_tokens=list(output.prompt_token_ids),
        cached=output.num_cached_tokens or 0,
        seconds=round(seconds, 3),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("tokens", type=int)
    parser.add_argument(
        "--extra", default="", help="kv_connector_extra_config, JSON; none: no connector"
    )
    parser.add_argument("--one-by-one", action="store_true")
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options = {}
    if arguments.extra:
        from kvstow.vllm import KvstowConnector

        WAITED.wrap(KvstowConnector)
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvstowConnector",
            kv_connector_module_path="kvstow.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=json.loads(arguments.extra),
        )
    engine = LLM(
        model=arguments.model,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=32,
        enforce_eager=True,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    with open(arguments.prompts) as file:
        prompts = [json.loads(line)["text"] for line in file]
    say(event="ready")
    if arguments.one_by_one:
        for i, prompt in enumerate(prompts):
            if not sys.stdin.readline():
                break
            say(event="start", prompt=i)
            start, waited = time.monotonic(), WAITED.seconds
            (output,) = engine.generate([prompt], sampling, use_tqdm=False)
            result(i, output, time.monotonic() - start, WAITED.seconds - waited)
    else:
        start = time.monotonic()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        for i, output in enumerate(outputs):
            result(i, output, time.monotonic() - start)
    say(event="end")


# What libraries print goes to standard error; standard output is for events.
EVENTS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
main()
