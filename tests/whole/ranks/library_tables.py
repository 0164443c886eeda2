"""Which models own_methods.py tries, and how their methods are called: transformers, PEFT, diffusers, Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.whole.ranks.generating import tiny
from tests.whole.ranks.method_tables import (
    LANGUAGE,
    LANGUAGE_REFUSED,
    LANGUAGE_UNTRIED,
    MODULE,
    MODULE_UNTRIED,
    SEQUENCES,
    T5,
    Call,
    alone,
    both_texts,
    language,
    lora,
    registered,
    under_no_grad,
    whole,
)  # fmt: skip

X, Y = torch.linspace(-1, 1, 24).reshape(6, 4), torch.linspace(1, -1, 12).reshape(6, 2)
IMAGES = torch.linspace(-1, 1, 4 * 64).reshape(4, 1, 8, 8)


def adapted() -> Any:
    """A Llama with adapters that have values."""
    from peft import get_peft_model

    model = get_peft_model(tiny("llama"), lora())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))
    return model


def diffusion() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    down, up = ("DownBlock2D",) * 2, ("UpBlock2D",) * 2
    sizes: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    return UNet2DModel(8, 1, 1, down_block_types=down, up_block_types=up, add_attention=False, **sizes)


def images() -> dict[str, Any]:
    return {"sample": IMAGES, "timestep": 3}


def lightning() -> Any:
    from pytorch_lightning import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x).relu()).relu())

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

        def test_step(self, batch: Any, number: int) -> Tensor:
            return F.mse_loss(self.third(self.second(self.first(batch[0]))), batch[1])

        def predict_step(self, batch: Any, number: int) -> Tensor:
            return self.forward(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Regression()


def numbers() -> dict[str, Any]:
    return {"x": X}


ADAPTED: dict[str, Call] = {
    **alone("get_base_model", "get_layer_status", "get_model_status", "get_nb_trainable_parameters"),
    **alone("print_trainable_parameters", "supports_lora_conversion"),
    "add_adapter": lambda run, given: run.add_adapter("other", lora()),
    "base_model_prepare_inputs_for_generation": lambda run, given: run.base_model_prepare_inputs_for_generation(
        SEQUENCES
    ),
    "create_or_update_model_card": lambda run, given: run.create_or_update_model_card(str(given.folder)),
    "delete_adapter": lambda run, given: (run.add_adapter("other", lora()), run.delete_adapter("other")),
    "disable_adapter": lambda run, given: without_adapter(run),
    "forward": lambda run, given: under_no_grad(run.forward, **language()),
    "from_pretrained": lambda run, given: run.from_pretrained(tiny("llama"), given.saved),
    "generate": lambda run, given: run.generate(SEQUENCES, max_new_tokens=2, do_sample=False, pad_token_id=0),
    "get_prompt": lambda run, given: run.get_prompt(2),
    "get_prompt_embedding_to_save": lambda run, given: run.get_prompt_embedding_to_save("default"),
    "prepare_inputs_for_generation": lambda run, given: run.prepare_inputs_for_generation(SEQUENCES),
    "prepare_model_for_gradient_checkpointing": lambda run, given: run.prepare_model_for_gradient_checkpointing(
        run.get_base_model()
    ),
    "save_pretrained": lambda run, given: run.save_pretrained(str(given.folder)),
    "set_adapter": lambda run, given: run.set_adapter("default"),
    "set_requires_grad": lambda run, given: run.set_requires_grad("default", False),
}  # fmt: skip
DIFFUSION: dict[str, Call] = {
    **alone("compile_repeated_blocks", "dequantize", "disable_gradient_checkpointing", "disable_npu_flash_attention"),
    **alone("disable_xformers_memory_efficient_attention", "disable_xla_flash_attention", "enable_npu_flash_attention"),
    **alone("enable_gradient_checkpointing", "enable_xformers_memory_efficient_attention"),
    **alone("get_memory_footprint", "num_parameters", "register_to_config"),
    **alone("reset_attention_backend", "to_json_string", "enable_xla_flash_attention"),
    "enable_group_offload": lambda run, given: run.enable_group_offload(torch.device("cpu")),
    "enable_layerwise_casting": lambda run, given: run.enable_layerwise_casting(torch.float16, torch.float32),
    "enable_parallelism": lambda run, given: run.enable_parallelism(config=None),
    "extract_init_dict": lambda run, given: run.extract_init_dict(dict(run.config)),
    "forward": lambda run, given: under_no_grad(run.forward, **images()),
    "from_config": lambda run, given: run.from_config(run.config).config,
    "from_pretrained": lambda run, given: run.from_pretrained(given.saved),
    "get_config_dict": lambda run, given: run.get_config_dict(given.saved / "none"),
    "load_config": lambda run, given: run.load_config(given.saved / "none"),
    "register_for_auto_class": lambda run, given: registered(run),
    "save_config": lambda run, given: run.save_config(given.folder),
    "save_pretrained": lambda run, given: run.save_pretrained(given.folder),
    "set_attention_backend": lambda run, given: run.set_attention_backend("native"),
    "set_use_memory_efficient_attention_xformers": lambda run, given: run.set_use_memory_efficient_attention_xformers(
        False
    ),
    "set_use_npu_flash_attention": lambda run, given: run.set_use_npu_flash_attention(False),
    "set_use_xla_flash_attention": lambda run, given: run.set_use_xla_flash_attention(False),
    "to_json_file": lambda run, given: run.to_json_file(given.folder / "config.json"),
}  # fmt: skip
EVENTS = [
    *("after_backward", "fit_end", "fit_start", "predict_end", "predict_epoch_end", "predict_epoch_start"),
    *("predict_model_eval", "predict_start", "test_end", "test_epoch_end", "test_epoch_start", "test_model_eval"),
    *("test_model_train", "test_start", "train_end", "train_epoch_end", "train_epoch_start", "train_start"),
    *("validation_end", "validation_epoch_end", "validation_epoch_start", "validation_model_eval"),
    *("validation_model_train", "validation_model_zero_grad", "validation_start"),
]
BATCH = (X, Y)
LIGHTNING: dict[str, Call] = {
    **alone(*(f"on_{event}" for event in EVENTS)),
    **alone("configure_callbacks", "configure_model", "configure_optimizers", "configure_sharded_model"),
    **alone("freeze", "lr_schedulers", "optimizers", "prepare_data", "train_dataloader", "val_dataloader"),
    **alone("test_dataloader", "predict_dataloader", "unfreeze", "save_hyperparameters", "print"),
    "all_gather": lambda run, given: run.all_gather(X),
    "backward": lambda run, given: run.backward(torch.ones((), requires_grad=True)),
    "clip_gradients": lambda run, given: run.clip_gradients(torch.optim.SGD([torch.ones(1)], 0.1), 1.0),
    "configure_gradient_clipping": lambda run, given: run.configure_gradient_clipping(
        torch.optim.SGD([torch.ones(1)], 0.1), 1.0
    ),
    "double": lambda run, given: (run.double(), run.dtype, run.float(), run.dtype),
    "forward": lambda run, given: under_no_grad(run.forward, x=X),
    "half": lambda run, given: (run.half(), run.dtype, run.float()),
    "load_from_checkpoint": lambda run, given: type(whole(run)).load_from_checkpoint(given.saved / "a"),
    "log": lambda run, given: run.log("loss", torch.ones(())),
    "log_dict": lambda run, given: run.log_dict({"loss": torch.ones(())}),
    "lr_scheduler_step": lambda run, given: run.lr_scheduler_step(
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], 0.1)), None
    ),
    "manual_backward": lambda run, given: run.manual_backward(torch.ones((), requires_grad=True)),
    "on_after_batch_transfer": lambda run, given: run.on_after_batch_transfer(BATCH, 0),
    "on_before_backward": lambda run, given: run.on_before_backward(torch.ones(())),
    "on_before_batch_transfer": lambda run, given: run.on_before_batch_transfer(BATCH, 0),
    "on_before_optimizer_step": lambda run, given: run.on_before_optimizer_step(None),
    "on_before_zero_grad": lambda run, given: run.on_before_zero_grad(None),
    "on_load_checkpoint": lambda run, given: run.on_load_checkpoint({}),
    "on_predict_batch_end": lambda run, given: run.on_predict_batch_end(None, BATCH, 0),
    "on_predict_batch_start": lambda run, given: run.on_predict_batch_start(BATCH, 0),
    "on_save_checkpoint": lambda run, given: run.on_save_checkpoint({}),
    "on_test_batch_end": lambda run, given: run.on_test_batch_end(None, BATCH, 0),
    "on_test_batch_start": lambda run, given: run.on_test_batch_start(BATCH, 0),
    "on_train_batch_end": lambda run, given: run.on_train_batch_end(None, BATCH, 0),
    "on_train_batch_start": lambda run, given: run.on_train_batch_start(BATCH, 0),
    "on_validation_batch_end": lambda run, given: run.on_validation_batch_end(None, BATCH, 0),
    "on_validation_batch_start": lambda run, given: run.on_validation_batch_start(BATCH, 0),
    "optimizer_step": lambda run, given: run.optimizer_step(0, 0, torch.optim.SGD([torch.ones(1)], 0.1)),
    "optimizer_zero_grad": lambda run, given: run.optimizer_zero_grad(0, 0, torch.optim.SGD([torch.ones(1)], 0.1)),
    "predict_step": lambda run, given: under_no_grad(run.predict_step, batch=BATCH, number=0),
    "remove_ignored_hparams": lambda run, given: run.remove_ignored_hparams([]),
    "setup": lambda run, given: run.setup("fit"),
    "teardown": lambda run, given: run.teardown("fit"),
    "test_step": lambda run, given: under_no_grad(run.test_step, batch=BATCH, number=0),
    "toggle_optimizer": lambda run, given: run.toggle_optimizer(torch.optim.SGD([torch.ones(1)], 0.1)),
    "toggled_optimizer": lambda run, given: run.toggled_optimizer(torch.optim.SGD([torch.ones(1)], 0.1)).__enter__(),
    "training_step": lambda run, given: run.training_step(BATCH, 0).detach(),
    "transfer_batch_to_device": lambda run, given: run.transfer_batch_to_device(X, torch.device("cpu"), 0),
    "untoggle_optimizer": lambda run, given: run.untoggle_optimizer(torch.optim.SGD([torch.ones(1)], 0.1)),
    "validation_step": lambda run, given: under_no_grad(run.validation_step, batch=BATCH, number=0),
}  # fmt: skip


def without_adapter(run: Any) -> Any:
    with run.disable_adapter():
        return under_no_grad(run, **language()).logits


MADE: dict[str, Callable[[], Any]] = {
    **{name: partial(tiny, name) for name in ("llama", "mixtral", "t5")},
    "peft": adapted,
    "diffusers": diffusion,
    "pytorch_lightning": lightning,
}
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": language,
    "mixtral": language,
    "t5": both_texts,
    "peft": language,
    "diffusers": images,
    "pytorch_lightning": numbers,
}
SHARES = {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"}
TABLES = {"llama": LANGUAGE, "mixtral": LANGUAGE, "t5": LANGUAGE | T5}
TABLES |= {"peft": ADAPTED, "diffusers": DIFFUSION, "pytorch_lightning": LIGHTNING}
HUB = {"push_to_hub": LANGUAGE_REFUSED["push_to_hub"]}
ADAPTED_REFUSED = HUB | {"load_adapter": lambda run, given: run.load_adapter(given.saved, "other")}
REFUSED = dict.fromkeys(("llama", "mixtral", "t5"), LANGUAGE_REFUSED)
REFUSED |= {
    "peft": ADAPTED_REFUSED,
    "diffusers": HUB,
    "pytorch_lightning": alone("to_onnx", "to_tensorrt", "to_torchscript"),
}
UNTRIED = dict.fromkeys(("llama", "mixtral", "t5"), MODULE_UNTRIED | LANGUAGE_UNTRIED)
UNTRIED |= dict.fromkeys(("peft", "diffusers", "pytorch_lightning"), MODULE_UNTRIED)


def table_of(name: str) -> dict[str, Call]:
    """All methods of this model that are called."""
    return MODULE | TABLES[name]
