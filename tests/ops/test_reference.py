"""The operators as declared: hand-computed numbers, gradients, schemas, messages."""

import pytest
import torch

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import implementation, transition_score, transition_step
from sage_fast.ops.philox import philox_normal
from sage_fast.ops.transition_score import transition_score_reference
from sage_fast.ops.transition_step import transition_step_reference

TABLE = transition_table(sigma_schedule(6, 3.0), "precise", 0.8)  # its last step has c = 0
COEFS = TABLE.coefficients()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(3, 4, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(5)
    )


def test_step_by_hand() -> None:
    x, v, v_uncond, *_ = inputs()
    step, seed = torch.tensor([0, 3, 5]), torch.tensor([5, 6, 7])
    x_next, log_prob = transition_step(x, v, COEFS, step, seed, v_uncond, torch.tensor(2.5))
    noise = philox_normal(seed, step, (4, 3), dtype=torch.float64)
    for i, t in enumerate(step.tolist()):
        a, b, c = COEFS[t, :3].double()
        mean = a * x[i] + b * (v_uncond[i] + 2.5 * (v[i] - v_uncond[i]))
        torch.testing.assert_close(x_next[i], mean + c * noise[i], rtol=1e-12, atol=1e-12)
        density = torch.distributions.Normal(mean, c) if c > 0 else None
        expected = float(density.log_prob(x_next[i]).mean()) if density else 0.0
        assert float(log_prob[i]) == pytest.approx(expected, rel=1e-6)


def test_score_by_hand() -> None:
    x, x_next, v, v_anchor, v_old = inputs()
    step = torch.tensor([0, 3, 5])
    log_prob, kl_anchor, kl_old, *errors = transition_score(
        x, x_next, v, COEFS, step, v_anchor, v_old, 0.3
    )
    for i, t in enumerate(step.tolist()):
        a, b, c = COEFS[t, :3].double()
        for error, branch in zip(errors, (0.7 * v_old + 0.3 * v, 1.3 * v_old - 0.3 * v)):
            assert float(error[i]) == pytest.approx(
                float((x_next[i] - a * x[i] - b * branch[i]).abs().mean())
            )
        if c == 0:
            assert (float(log_prob[i]), float(kl_anchor[i]), float(kl_old[i])) == (0, 0, 0)
            continue
        policy = torch.distributions.Normal(a * x[i] + b * v[i], c)
        assert float(log_prob[i]) == pytest.approx(
            float(policy.log_prob(x_next[i]).mean()), rel=1e-6
        )
        for kl, other in ((kl_anchor, v_anchor), (kl_old, v_old)):
            expected = torch.distributions.kl_divergence(
                policy, torch.distributions.Normal(a * x[i] + b * other[i], c)
            ).mean()
            assert float(kl[i]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("guidance", [None, 2.5])
@pytest.mark.parametrize("anchors", [0, 1, 2])
def test_score_gradient(anchors: int, guidance: float | None) -> None:
    """The operator's own backward against finite differences and against autograd through the
    reference."""
    x, x_next, v, v_anchor, v_old = inputs()
    others = (v_anchor if anchors > 0 else None, v_old if anchors > 1 else None)
    step = torch.tensor([0, 3, 5])
    trained = [v.requires_grad_()] + ([torch.randn_like(v).requires_grad_()] if guidance else [])

    def score(v: torch.Tensor, v_uncond: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return transition_score(x, x_next, v, COEFS, step, *others, 0.3, v_uncond, guidance)

    assert torch.autograd.gradcheck(score, trained)
    upstream = [torch.randn(3, dtype=torch.float64) for _ in range(3)]
    scores = score(*trained)
    assert not any(error.requires_grad for error in scores[3:])
    ours = torch.autograd.grad(scores[:3], trained, upstream)
    pair = (trained[1], guidance) if guidance else (None, None)
    outputs = transition_score_reference(x, x_next, v, *pair, *others, COEFS, step, 0.3)
    used = [(out, grad) for out, grad in zip(outputs, upstream) if out.requires_grad]
    theirs = torch.autograd.grad([out for out, _ in used], trained, [grad for _, grad in used])
    for name, ours_of, theirs_of in zip(("dv", "dv_uncond"), ours, theirs):
        torch.testing.assert_close(
            ours_of, theirs_of, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0), (2,)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x, v = torch.randn(shape), torch.randn(shape)
    seed = torch.arange(shape[0])
    x_next, log_prob = transition_step(x, v, COEFS, torch.tensor(1), seed)
    assert x_next.shape == shape
    assert log_prob.shape == shape[:1]
    assert log_prob.isfinite().all()
    v.requires_grad_()
    outputs = transition_score(x, x_next, v, COEFS, torch.tensor(1), v.detach(), beta=0.3)
    torch.stack(outputs).sum().backward()
    assert v.grad is not None
    assert v.grad.shape == shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, s: transition_step(x, x[:2], COEFS, s, torch.arange(3)),
            "v: expected the shape of x",
        ),
        (
            lambda x, s: transition_step(x, x, COEFS[:, :5], s, torch.arange(3)),
            r"coefs: expected \[T, 6\]",
        ),
        (
            lambda x, s: transition_step(x, x, COEFS, s.int(), torch.arange(3)),
            "step: expected int64",
        ),
        (
            lambda x, s: transition_step(
                x, x, COEFS, torch.zeros(2, dtype=torch.int64), torch.arange(3)
            ),
            "step: expec",
        ),
        (
            lambda x, s: transition_step(x, x, COEFS, s, torch.arange(2)),
            r"seed: expected int64 \[3\]",
        ),
        (lambda x, s: transition_step(x, x, COEFS, s, torch.arange(3), x), "go together"),
        (
            lambda x, s: transition_score(x, x, x, COEFS, s, x[:1]),
            "v_anchor: expected the shape of x",
        ),
        (lambda x, s: transition_score(x, x, x, COEFS, s, v_uncond=x), "go together"),
        (lambda x, s: transition_score(x, x, x, COEFS, s, guidance=6.0), "go together"),
        (
            lambda x, s: transition_score(x, x, x, COEFS, s, v_uncond=x[:2], guidance=6.0),
            "v_uncond: expected the sha",
        ),
        (
            lambda x, s: transition_score(x, x, x, COEFS.to("meta"), s),
            "coefs: is on meta, x is on cpu",
        ),
    ],
)
def test_messages(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 4), torch.tensor(0))


@pytest.mark.skipif(
    implementation(torch.device("cpu")) != "C++", reason="the C++ extension is not built"
)
def test_step_outside_the_table() -> None:
    x, v, *_ = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="step 6 is outside the table of 6 rows"):
        transition_step(x, v, COEFS, torch.tensor(6), torch.arange(3))


def test_reference_is_what_the_operator_runs_in_float64() -> None:
    x, v, *_ = inputs()
    step, seed = torch.tensor(2), torch.arange(3)
    for ours, theirs in zip(
        transition_step(x, v, COEFS, step, seed),
        transition_step_reference(x, v, None, None, COEFS, step, seed),
    ):
        assert torch.equal(ours, theirs)
