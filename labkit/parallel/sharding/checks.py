"""What FSDP refuses before it changes a model."""

from torch import nn

from labkit.parallel.data_parallel.consistency import check_module
from labkit.parallel.overlap import tensors_in
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.hooks import OF_EVERY_MODULE
from labkit.parallel.sharding.sharded import check_shardable
from labkit.parallel.sharding.unit import Options


def check_model(module: nn.Module, options: Options) -> None:
    """Raise ValueError for invalid arguments, and for parameters that cannot be sharded."""
    wrong = {options.compute_dtype, options.reduce_dtype} - {None, *FLOAT_TYPES}
    if wrong:
        raise ValueError(f"dtypes must be among {', '.join(map(str, FLOAT_TYPES))}; got {wrong}")
    if options.prefetch < 0:
        raise ValueError(f"expected to prefetch 0 units or more, got {options.prefetch}")
    check_module(module, None)
    check_shardable(module.named_parameters(), are_averaged=True)
    if len({tensor.device for tensor in (*module.parameters(), *module.buffers())}) > 1:
        raise ValueError("expected all parameters and buffers on one device")
    _check_attributes(module)
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"expected parameters without hooks, and {name} has some: put them on parameters()"
                " later"
            )


def _check_attributes(module: nn.Module) -> None:
    """Raise ValueError for parameters in other attributes than torch's: they would not be trained.

    What closures and global variables hold cannot be found.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    for path, each in module.named_modules():
        if isinstance(each, nn.RNNBase):
            continue  # its list of weights follows its parameters
        for attribute, value in vars(each).items():
            if attribute in OF_EVERY_MODULE:
                continue
            for tensor in tensors_in(value):
                # Only parameters: a tensor that the model computed is no alias.
                if isinstance(tensor, nn.Parameter) and tensor in names:
                    raise ValueError(
                        f"expected parameters in modules, and {f'{path}.{attribute}'.lstrip('.')}"
                        f" holds {names[tensor]}: read the module's attribute in forward"
                    )
