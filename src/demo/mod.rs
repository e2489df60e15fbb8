//! The demo: nodes on this machine, skewed work, and a check of what they did.

mod child;
mod files;
mod fleet;
mod ledger;
mod links;
mod regions;
mod report;
mod screen;
mod verify;
