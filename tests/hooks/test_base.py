"""A hook made of functions, and periods."""

from trainwright.engine.loop import TrainerBase
from trainwright.hooks import CallbackHook


class Nothing(TrainerBase):
    def run_step(self) -> None:
        pass


def test_callback_hook_calls_the_functions_it_has() -> None:
    calls: list[str] = []
    trainer = Nothing()
    trainer.register_hooks(
        [
            CallbackHook(
                before_train=lambda t: calls.append("before_train"),
                before_step=lambda t: calls.append(f"before_step {t.iter}"),
                after_step=lambda t: calls.append(f"after_step {t.iter}"),
                after_train=lambda t: calls.append("after_train"),
                after_end=lambda t: calls.append(f"after_end {t.has_failed}"),
            )
        ]
    )
    trainer.train(0, 1)
    assert calls == ["before_train", "before_step 0", "after_step 0", "after_train", "after_end False"]
