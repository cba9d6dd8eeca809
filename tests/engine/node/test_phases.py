from engine.node.phases import Phases


def test_parts_follow_each_other_and_add_up():
    phases = Phases(10.0)
    phases.end("imports", 10.5)
    phases.end("join", 10.75)
    phases.end("imports", 12.0)
    assert phases.line() == "2.00 s: imports 1.75, join 0.25"
