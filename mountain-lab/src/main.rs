mod emulator;
mod hosts;
mod netns;
mod scenario;
mod schedule;
fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args[1] == "emulate" {
        return emulator::child_main();
    }
    let s = scenario::Scenario::find(&args[2])?;
    let h = hosts::Hosts::build(&s)?;
    println!("built {}", h.client.name());
    let mut e = emulator::Emulator::start(&h, &s, 1)?;
    e.play(0, emulator::monotonic_ns())?;
    println!("up");
    std::thread::sleep(std::time::Duration::from_secs(args[3].parse()?));
    Ok(())
}
