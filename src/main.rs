//! The `meshwork` binary: a demo, a stand-alone node, an operator's view.
#![forbid(unsafe_code)]

mod cli;
mod demo;

fn main() {}
