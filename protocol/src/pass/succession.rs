//! Whose range of slots a new client takes.
//!
//! A client that died leaves its range with passes in it. They are for the next client of its name,
//! so that one comes first; then a range with nothing in it; and a stranger's only where there is no
//! other, for then the replies in it are told to nobody.

/// A choice of ranges, tried in the order of [`Choice::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// That of a dead client of its name, whose replies it adopts.
    Namesake,
    /// One with nothing in it.
    Clean,
    /// That of any dead client.
    Stranger,
}

impl Choice {
    /// All, the best first.
    pub const ALL: [Self; 3] = [Self::Namesake, Self::Clean, Self::Stranger];

    /// Whether it is this range, which holds something of a dead client or not. Whether the dead one
    /// had the new one's name is asked where that matters.
    pub fn takes(self, has_leftovers: bool, is_namesake: impl FnOnce() -> bool) -> bool {
        match self {
            Self::Namesake => has_leftovers && is_namesake(),
            Self::Clean => !has_leftovers,
            Self::Stranger => true,
        }
    }

    /// Whether what is in the range is dropped, once it has run, rather than told to the new client.
    pub fn disowns(self) -> bool {
        self == Self::Stranger
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes the first range of these, each with what it holds: `None` is clean.
    fn choose(name: &str, ranges: &[Option<&str>]) -> Option<(Choice, usize)> {
        Choice::ALL.into_iter().find_map(|choice| {
            let takes = |dead: &Option<&str>| choice.takes(dead.is_some(), || *dead == Some(name));
            ranges.iter().position(takes).map(|index| (choice, index))
        })
    }

    #[test]
    fn a_namesake_comes_before_a_clean_range_and_that_before_a_stranger() {
        let ranges = [Some("b"), None, Some("a")];
        assert_eq!(choose("a", &ranges), Some((Choice::Namesake, 2)));
        assert_eq!(choose("c", &ranges), Some((Choice::Clean, 1)));
        assert_eq!(choose("c", &ranges[..1]), Some((Choice::Stranger, 0)));
        assert_eq!(choose("c", &[]), None);
    }

    #[test]
    fn only_a_strangers_replies_are_told_to_nobody() {
        assert_eq!(Choice::ALL.map(Choice::disowns), [false, false, true]);
    }
}
