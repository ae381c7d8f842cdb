"""Ranges of the trainer's settings, and that the packaged configurations compose."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runtime.config import Dtype, FeaturesConfig, ModelConfig, RegistryConfig
from runtime.errors import ConfigError
from training.capture.config import AnswersConfig
from training.config import DataConfig, Mode, RemoteConfig, TrainerConfig, TrainingConfig
from training.interleaved.config import ProducerConfig
from training.judging.config import GateConfig


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (TrainerConfig, {"run_id": "../escape"}, "trainer.run_id is '../escape'"),
        (TrainerConfig, {"init": " "}, "trainer.init"),
        (TrainerConfig, {"ttt_steps": 0}, "trainer.ttt_steps is 0"),
        (TrainerConfig, {"learning_rate": 0.0}, "trainer.learning_rate is 0.0"),
        (TrainerConfig, {"depth_decay": 1.5}, "trainer.depth_decay is 1.5"),
        (TrainerConfig, {"depth_weights": [1.0]}, r"trainer.depth_weights is [1.0]"),
        (TrainerConfig, {"depth_weights": [1.0, -1.0, 1.0]}, "trainer.depth_weights is [1.0, -1.0, 1.0]"),
        (TrainerConfig, {"lk_eta": -1.0}, "trainer.lk_eta is -1.0"),
        (TrainerConfig, {"accumulation": 0}, "trainer.accumulation is 0"),
        (TrainerConfig, {"rank_timeout_s": 0.0}, "trainer.rank_timeout_s is 0.0"),
        (TrainerConfig, {"ema_decay": 1.0}, "trainer.ema_decay is 1.0"),
        (TrainerConfig, {"hedge": [1.0]}, "trainer.hedge is [1.0]"),
        (TrainerConfig, {"hedge": [1.0, 1.0]}, "trainer.hedge is [1.0, 1.0]"),
        (TrainingConfig, {"trainer": TrainerConfig(accumulation=1000)}, "data.replay_rows is 1024"),
        (TrainerConfig, {"niceness": 20}, "trainer.niceness is 20"),
        (TrainerConfig, {"num_threads": 0}, "trainer.num_threads is 0"),
        (TrainerConfig, {"num_threads": 100_000}, "trainer.num_threads is 100000"),
        (TrainerConfig, {"max_steps": 0}, "trainer.max_steps is 0"),
        (TrainerConfig, {"idle_timeout_s": -1.0}, "trainer.idle_timeout_s is -1.0"),
        (TrainerConfig, {"evaluate_every_s": -1.0}, "trainer.evaluate_every_s is -1.0"),
        (TrainerConfig, {"keep_checkpoints": 0}, "trainer.keep_checkpoints is 0"),
        (TrainerConfig, {"draft_vocab_size": 1}, "trainer.draft_vocab_size is 1"),
        (GateConfig, {"confidence": 1.0}, "trainer.gate.confidence is 1.0"),
        (GateConfig, {"min_heldout_rows": 1}, "trainer.gate.min_heldout_rows is 1"),
        (GateConfig, {"max_heldout_rows": 4}, "trainer.gate.max_heldout_rows is 4"),
        (GateConfig, {"resamples": 10**9}, "trainer.gate.resamples is 1000000000"),
        (GateConfig, {"max_slice_loss": 1.5}, "trainer.gate.max_slice_loss is 1.5"),
        (DataConfig, {"poll_s": 0.0}, "data.poll_s is 0.0"),
        (DataConfig, {"poll_s": float("inf")}, "data.poll_s is inf"),
        (RegistryConfig, {"poll_s": 1e12}, "registry.poll_s is 1000000000000.0"),
        (RegistryConfig, {"root": ""}, "registry.root is ''"),
        (FeaturesConfig, {"root": " "}, "features.root is ' '"),
        (TrainingConfig, {"state_dir": ""}, "state_dir is ''"),
        (DataConfig, {"batch_rows": 0}, "data.batch_rows is 0"),
        (DataConfig, {"replay_rows": 4}, "data.replay_rows is 4"),
        (DataConfig, {"replay_share": 1.0}, "data.replay_share is 1.0"),
        (DataConfig, {"recency": -1.0}, "data.recency is -1.0"),
        (DataConfig, {"slice_balance": 2.0}, "data.slice_balance is 2.0"),
        (DataConfig, {"passes": 0}, "data.passes is 0"),
        (DataConfig, {"lease_timeout_s": 0.5}, "data.lease_timeout_s is 0.5"),
        (DataConfig, {"lease_timeout_s": 1e6}, "data.lease_timeout_s is 1000000.0"),
        (DataConfig, {"prompts": " "}, "data.prompts is ' '"),
        (DataConfig, {"corpus": ""}, "data.corpus is ''"),
        (DataConfig, {"max_tokens": 7}, "data.max_tokens is 7"),
        (DataConfig, {"heldout_fraction": 0.6}, "data.heldout_fraction is 0.6; it must be between 0 and 0.5, or null"),
        (TrainingConfig, {"data": DataConfig(corpus="file")}, "data.corpus is 'file'"),
        (AnswersConfig, {"temperatures": []}, "answers.temperatures is []"),
        (AnswersConfig, {"temperatures": [0.0, 2.5]}, "answers.temperatures is [0.0, 2.5]"),
        (AnswersConfig, {"max_tokens": 1}, "answers.max_tokens is 1"),
        (AnswersConfig, {"concurrency": 0}, "answers.concurrency is 0"),
        (AnswersConfig, {"kv_budget_mib": 1}, "answers.kv_budget_mib is 1"),
        (AnswersConfig, {"directory": ""}, "answers.directory is ''"),
        (AnswersConfig, {"shard_tokens": 0}, "answers.shard_tokens is 0"),
        (AnswersConfig, {"flush_every_s": -1.0}, "answers.flush_every_s is -1.0"),
        (TrainingConfig, {"mode": Mode.CAPTURE}, "data.prompts is None"),
        (TrainingConfig, {"mode": Mode.INTERLEAVED}, "data.prompts is None"),
        (TrainingConfig, {"data": DataConfig(prompts="file")}, "data.prompts is 'file'"),
        (TrainerConfig, {"worker": "a/b"}, "trainer.worker is 'a/b'"),
        (RemoteConfig, {"ca": ""}, "remote.ca is ''"),
        (RemoteConfig, {"certificate": "file"}, "remote.private_key is None"),
        (RemoteConfig, {"patience_s": 0.0}, "remote.patience_s is 0.0"),
        (ProducerConfig, {"max_rounds": 0}, "producer.max_rounds is 0"),
        (ProducerConfig, {"max_tokens": 1}, "producer.max_tokens is 1"),
        (ProducerConfig, {"temperature": 3.0}, "producer.temperature is 3.0"),
        (ProducerConfig, {"concurrency": 0}, "producer.concurrency is 0"),
        (ProducerConfig, {"swap_every_s": -1.0}, "producer.swap_every_s is -1.0"),
        (ProducerConfig, {"heldout_fraction": 0.6}, "producer.heldout_fraction is 0.6"),
        (ProducerConfig, {"high_rows": 31}, "producer.high_rows is 31"),
        (ProducerConfig, {"low_mib": 0}, "producer.low_mib is 0"),
        (ProducerConfig, {"join_timeout_s": 0.0}, "producer.join_timeout_s is 0.0"),
        (TrainingConfig, {"model": ModelConfig(dtype=Dtype.BFLOAT16)}, "model.dtype is 'bfloat16'"),
    ],
)
def test_values_out_of_range_are_refused_by_name(kind: type, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match="must be") as refused:
        kind(**settings)
    assert str(refused.value).startswith(said)


def test_packaged_configurations_compose(tmp_path) -> None:
    groups = ["trainer=auto,scratch", "data=replay,epochs", "model=tiny,smollm2-135m", "speculation=off"]
    code = (
        "from runtime.configuration import main\n"
        "from training.config import TrainingConfig\n"
        "main('training', TrainingConfig, lambda config: print(config.trainer.init, config.data.passes, config.model.name))"
    )
    result = subprocess.run([sys.executable, "-c", code, "--multirun", *groups], capture_output=True, text=True, cwd=tmp_path)
    assert result.stderr == ""
    assert sorted(result.stdout.split("\n")[:-1]) == sorted(
        f"{init} {passes} {model}" for init in ("auto", "scratch") for passes in (6, 3) for model in ("tiny", "smollm2-135m")
    )
