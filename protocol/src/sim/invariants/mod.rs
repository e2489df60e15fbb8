//! What must hold after every step, one rule a file.

use crate::sim::Step;

mod bounds;
mod converged;
mod epochs;
mod no_false_death;
mod own_record;
mod precedence;

pub use converged::converged;

/// A rule that is looked at after every step of a world.
pub trait Invariant: std::fmt::Debug {
    /// What it is called when it is broken.
    fn name(&self) -> &'static str;

    /// Looks at one step.
    ///
    /// # Errors
    /// What is broken, in words.
    fn check(&mut self, step: &Step<'_>) -> Result<(), String>;
}

/// Every rule.
pub(super) fn all() -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(bounds::Bounds),
        Box::<epochs::Epochs>::default(),
        Box::new(no_false_death::NoFalseDeath),
        Box::new(own_record::OwnRecord),
        Box::<precedence::Precedence>::default(),
    ]
}
