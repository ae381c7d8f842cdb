"""A whole server on another backend: the same answer, drafts and rows for training as on transformers."""

from __future__ import annotations

from runtime.config import BackendConfig, DrafterConfig, DrafterKind

from .conftest import MakeDrafter, StartServer, wait_for


def test_mlx_serves_what_transformers_serves(start_server: StartServer, make_drafter: MakeDrafter) -> None:
    answers = []
    for name in ("transformers", "mlx"):
        drafter = DrafterConfig(DrafterKind.EAGLE3, str(make_drafter(1)))
        running = start_server(backend=BackendConfig(name=name, num_threads=1), drafter=drafter)
        with running.openai() as openai:
            answer = openai.chat.completions.create(
                messages=[{"role": "user", "content": "Why is the sky blue?"}],
                model="tiny",
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        assert answer.model_extra is not None
        assert answer.model_extra["speculation"]["drafted"] > 0
        answers.append(answer.choices[0].message.content)
        capture = running.parts.capture
        assert capture is not None
        wait_for(lambda capture=capture: capture.counters()["captured"] == 1)
    assert answers[0] == answers[1]
