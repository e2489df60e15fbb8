//! What the benchmark of passes and the comparison with peers (`benches/peers`) both use.

pub(crate) mod echo;
pub(crate) mod floors;
pub(crate) mod process;
pub(crate) mod scan;
pub(crate) mod scenario;

use std::time::Duration;

/// How long a client lets the worker idle before a round trip.
pub(crate) const IDLE: Duration = Duration::from_millis(5);

/// The middle value; of an even number, the upper one of the two.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A directory in memory, gone when dropped.
pub(crate) fn shared_directory() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("meshwork-passes-")
        .tempdir_in("/dev/shm")
        .expect("/dev/shm can be written")
}
