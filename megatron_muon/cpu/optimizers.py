"""Adam and SGD with Apex's interface, in plain torch.

Megatron's distributed optimizer saves and restores the step count of an Apex optimizer, which is in
the parameter group. With torch's own Adam, where it is in each parameter's state, resuming fails or
continues from a wrong step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled (AdamW) or coupled (L2) weight decay.

    With ``g`` the gradient and ``t`` the step of the group::

        p <- p - lr * weight_decay * p                  (adam_w_mode)
        g <- g + weight_decay * p                       (not adam_w_mode)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: True to divide the moments by ``1 - beta^t``.
        betas: decay of the first and the second moment.
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay, else L2.
        weight_decay: its factor.
        amsgrad: not supported, as in Apex.
        set_grad_none: True if ``zero_grad`` releases the gradients.
        capturable: accepted and ignored; there are no CUDA graphs.
        master_weights: not supported; Megatron has the masters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or master_weights:
            raise RuntimeError("FusedAdam on CPU has neither amsgrad nor master_weights.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Release or zero the gradients, by default according to ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, if there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        lr, weight_decay, step = group["lr"], group["weight_decay"], group["step"]
        beta1, beta2 = group["betas"]
        grad = param.grad
        assert grad is not None

        if weight_decay != 0:
            if self.adam_w_mode:
                param.mul_(1 - lr * weight_decay)
            else:
                grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        denominator = (exp_avg_sq.sqrt() / math.sqrt(correction2)).add_(group["eps"])
        param.addcdiv_(exp_avg, denominator, value=-lr / correction1)


class FusedSGD(torch.optim.SGD):
    """SGD under Apex's signature.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: momentum factor.
        dampening: dampening of the momentum.
        weight_decay: L2 factor.
        nesterov: True for Nesterov momentum.
        wd_after_momentum: not supported.
        materialize_master_grads: accepted and ignored; Megatron has the masters.
        set_grad_none: accepted and ignored; Megatron passes it to ``zero_grad``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise RuntimeError("FusedSGD on CPU decays weights before the momentum only.")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
