"""A vLLM engine whose rejection sampler accepts too often: the law test must notice it."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    """Make uniform numbers smaller than they are, then run as `bench.vllm_process` does."""
    from vllm.v1.sample import rejection_sampler

    from bench.vllm_process import main as run

    made = rejection_sampler.generate_uniform_probs
    rejection_sampler.generate_uniform_probs = lambda *args, **kwargs: 0.75 * made(*args, **kwargs)
    run()


if __name__ == "__main__":
    main()
