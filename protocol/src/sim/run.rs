//! Running a scenario over seeds, so that a failure can be replayed.

/// Runs `scenario` with each of the first `default` seeds.
///
/// `MESHWORK_SEEDS=n` runs `n` seeds instead; `MESHWORK_SEED=s` runs that one alone. A seed that fails
/// is printed with the command that replays it.
///
/// # Panics
/// When either variable is not a number, and whenever `scenario` does.
pub fn for_seeds(default: u64, mut scenario: impl FnMut(u64)) {
    let number = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse::<u64>().unwrap_or_else(|e| panic!("{name}={text:?} is not a number: {e}"))
        })
    };
    let seeds = match number("MESHWORK_SEED") {
        Some(seed) => seed..=seed,
        None => 1..=number("MESHWORK_SEEDS").unwrap_or(default),
    };
    for seed in seeds {
        let _replay = Replay(seed);
        scenario(seed);
    }
}

struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let thread = std::thread::current();
            eprintln!(
                "seed {seed} failed; replay it with\n  MESHWORK_SEED={seed} cargo test -p \
                 meshwork-protocol --features sim {name}",
                seed = self.0,
                name = thread.name().unwrap_or_default(),
            );
        }
    }
}
