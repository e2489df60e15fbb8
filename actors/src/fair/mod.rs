//! Where jobs run: the actors of the tenant arbiters.

pub mod runner;
pub mod tenant_executor;
