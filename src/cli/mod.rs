//! What the binary does beside the demo, and what both share.

pub(crate) mod args;
pub(crate) mod digest;
pub(crate) mod ndjson;
pub(crate) mod node;
#[cfg(target_os = "linux")]
pub(crate) mod passes;
pub(crate) mod protocol;
pub(crate) mod service;
pub(crate) mod signals;
pub(crate) mod socket;
pub(crate) mod status;

/// Whether the environment asks for text without colors, as <https://no-color.org> has it.
pub(crate) fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
