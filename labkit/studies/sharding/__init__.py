"""The sharding lab: what each stage of ZeRO saves, sends and costs."""
