from vllm.v1.core.sched.output import SchedulerOutput

class GPUModelRunner:
    def update_requests(self, scheduler_output: SchedulerOutput) -> None: ...
