"""Self-Forcing under a cache, in its own code: `python examples/self_forcing.py --repo ~/Self-Forcing`.

Runs the `CausalInferencePipeline` of a checkout of guandeh17/Self-Forcing (or thu-ml/Causal-Forcing), bare and under
several methods, and prints what each left out and how far its latents are from the bare ones. Without `--weights` the
transformer is small and random, text encoder and VAE are left out, and `--cpu` puts PyTorch's attention in the place of
FlashAttention: that shows that the K/V are kept right and what is skipped, and says nothing about pictures.

All noise comes from a bank of `rollcache.noise`: fresh for every chunk, as in their own loop, or with `--shared-noise`
the same in all of them, which changes the video.
"""

import argparse
import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch

import rollcache
from rollcache import C3ache, StepReuse, WindowReuse, XCache, noise
from rollcache.adapters.self_forcing import self_forcing

SETTINGS = {
    "denoising_step_list": [1000, 750, 500, 250],
    "warp_denoising_step": True,
    "num_frame_per_block": 3,
    "independent_first_frame": False,
    "context_noise": 0,
}
POLICIES = {
    "XCache, never skipping": XCache(min_cosine=1),
    "XCache": XCache(),
    "WindowReuse": WindowReuse(),
    "C3ache": C3ache(),
    "StepReuse, 2 of 4 steps": StepReuse(steps=4, anchors=(0, 2)),
}
SMALL = {"dim": 192, "ffn_dim": 512, "num_heads": 4, "num_layers": 8, "text_dim": 64, "text_len": 16}
PARTS = ("pipeline/causal_inference.py", "utils/wan_wrapper.py", "wan/modules/causal_model.py")  # of a checkout
SIZE = (8, 12)  # of a small latent frame; patches of 2 make 24 tokens of it


def main() -> None:
    args = parse()
    torch.set_grad_enabled(False)
    pipeline = make(args)
    model = pipeline.generator.model
    prompt = [args.prompt]
    bank = noise.per_cycle(None, seed=args.seed) if args.shared_noise else noise.fresh(seed=args.seed)

    def run(policy=None):
        """One video: latents, K/V, statistics."""
        size = (60, 104) if args.weights else SIZE
        start = bank.video(1, 3 * args.chunks, 16, *size, frames=3).to(next(model.parameters()))
        pipeline.scheduler.add_noise = NoiseAfterSteps(bank, pipeline.scheduler)
        cache = None
        if policy is not None:
            cache = rollcache.enable(model, policy, adapter=self_forcing(fresh_noise=bank.is_fresh(1)))
        silent = io.StringIO()  # their progress
        with (
            cache or contextlib.nullcontext(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
        ):
            latents = pipeline.inference(start, prompt, return_latents=True)[1]
        kv = [value.clone() for block in pipeline.kv_cache1 for value in block.values()]
        return latents.float(), kv, cache

    wanted, wanted_kv, _ = run()
    print(f"{len(model.blocks)} blocks, {args.chunks} chunks of 3 latent frames, 4 steps and a commit each")
    print(f"{bank.describe()}\n")
    print(f"{'method':<26}{'skipped':>9}{'relative error':>16}   latents, K/V and indices")
    for name, policy in POLICIES.items():
        latents, kv, cache = run(policy)
        error = ((latents - wanted).norm() / wanted.norm()).item()
        equal = torch.equal(latents, wanted) and all(map(torch.equal, kv, wanted_kv))
        indices = all(torch.equal(a, b) for a, b in zip(kv, wanted_kv, strict=True) if a.numel() == 1)
        stats = cache.stats()
        say = "bit-equal" if equal else f"differ, indices {'equal' if indices else 'DIFFER'}"
        print(f"{name:<26}{stats.skip_rate:>9.1%}{error:>16.4f}   {say}")
    passes = ", ".join(f"{number} {role}" for role, number in stats.passes.items())
    print(f"\nPasses of each run: {passes}. Skipped: of the block evaluations of denoise passes after warm-up.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repo", type=Path, required=True, help="your checkout of guandeh17/Self-Forcing")
    parser.add_argument("--weights", type=Path, help="its checkpoint; wan_models/ must be in the working directory")
    parser.add_argument("--cpu", action="store_true", help="run without CUDA and FlashAttention")
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--window", type=int, default=-1, help="K/V window in latent frames; -1 keeps all")
    parser.add_argument("--sink", type=int, default=0, help="latent frames that the window never gives up")
    parser.add_argument("--shared-noise", action="store_true", help="the same noise in every chunk: another video")
    parser.add_argument("--prompt", default="A car drives through a city at dusk.")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make(args: argparse.Namespace):
    """Their pipeline, or one line and exit code 2 if it cannot be had."""
    repo = args.repo.expanduser().resolve()
    if not repo.is_dir():
        refuse(f"--repo {args.repo}: no such folder. It takes a checkout of https://github.com/guandeh17/Self-Forcing.")
    if missing := [part for part in PARTS if not (repo / part).is_file()]:
        refuse(f"--repo {args.repo}: no checkout of Self-Forcing, it has no {', '.join(missing)}.")
    if args.weights and not args.weights.is_file():
        refuse(f"--weights {args.weights}: no such file.")
    sys.path.insert(0, str(repo))
    try:
        return (load if args.weights else small)(args)
    except ModuleNotFoundError as error:
        refuse(f"--repo {args.repo}: its code needs the module {error.name}, see its requirements.txt.")


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def load(args: argparse.Namespace):
    """The real thing: 1.3 B parameters, text encoder, VAE."""
    from pipeline import CausalInferencePipeline

    kwargs = {"timestep_shift": 5.0, "local_attn_size": args.window, "sink_size": args.sink}
    made = CausalInferencePipeline(SimpleNamespace(**SETTINGS, model_kwargs=kwargs), device="cuda")
    made.generator.load_state_dict(torch.load(args.weights, map_location="cpu")["generator_ema"])
    return made.to("cuda", torch.bfloat16)


def small(args: argparse.Namespace):
    """Their pipeline and transformer, small and random, with stand-ins for what makes text and pictures."""
    if args.cpu:
        pretend_cuda()
    from pipeline import CausalInferencePipeline
    from utils import wan_wrapper

    torch.manual_seed(args.seed)
    model_class = wan_wrapper.CausalWanModel
    model_class.from_pretrained = lambda _path, **sizes: model_class(**SMALL, **sizes)
    generator = wan_wrapper.WanDiffusionWrapper(
        timestep_shift=5.0, is_causal=True, local_attn_size=args.window, sink_size=args.sink
    )
    model = generator.model
    torch.nn.init.normal_(model.head.head.weight, std=0.02)  # which starts at zero
    if args.cpu:
        use_torch_attention()

    text = torch.randn(1, SMALL["text_len"], SMALL["text_dim"])
    made = CausalInferencePipeline(
        SimpleNamespace(**SETTINGS),
        device="cpu" if args.cpu else "cuda",
        generator=generator.to("cpu" if args.cpu else "cuda"),
        text_encoder=lambda text_prompts: {"prompt_embeds": text.to(next(model.parameters()))},
        vae=SimpleNamespace(decode_to_pixel=lambda latents, use_cache: latents),
    )
    made.num_transformer_blocks = SMALL["num_layers"]
    made.frame_seq_length = SIZE[0] * SIZE[1] // 4
    rows = made.frame_seq_length * (3 * args.chunks if args.window == -1 else args.window)
    heads = SMALL["num_heads"], SMALL["dim"] // SMALL["num_heads"]
    kv = torch.zeros(1, rows, *heads, device=next(model.parameters()).device)
    made.kv_cache1 = [{"k": kv.clone(), "v": kv.clone()} for _ in model.blocks]  # theirs is made for 1.3 B
    made.crossattn_cache = [{"is_init": False} for _ in model.blocks]
    return made


def pretend_cuda() -> None:
    """Their modules ask for the current device when they are imported."""
    torch.cuda.current_device = lambda: 0


def use_torch_attention() -> None:
    """Attention without FlashAttention, in the precision of the model."""
    from wan.modules import causal_model, model

    def attention(q, k, v, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    causal_model.attention = model.flash_attention = attention


class NoiseAfterSteps:
    """In the place of a scheduler's `add_noise`: what it adds comes from a bank.

    The loop adds noise after every step of a chunk but the last.
    """

    def __init__(self, bank: noise.Bank, scheduler) -> None:
        self.bank, self.scheduler, self.calls = bank, scheduler, 0

    def __call__(self, clean, like, t):
        """Latents [B*F, C, H, W] at the level of the next step."""
        chunk, step = divmod(self.calls, len(SETTINGS["denoising_step_list"]) - 1)
        self.calls += 1
        drawn = self.bank.at(chunk, step + 1).like(like)
        return type(self.scheduler).add_noise(self.scheduler, clean, drawn, t)


if __name__ == "__main__":
    main()
