//! Whose range of slots a new client takes.
//!
//! A client that died leaves its range with passes in it. They are for the next client of its name,
//! so that one comes first; then a range with nothing in it; and a stranger's only where there is no
//! other, for then the replies in it are told to nobody. No name is nobody's name: a client without
//! one has no successor.

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

    /// Whether a client of this name takes this range, which holds something of a dead client or not.
    /// That one's name is asked for where it matters.
    pub fn takes(
        self,
        name: &str,
        has_leftovers: bool,
        predecessor: impl FnOnce() -> String,
    ) -> bool {
        match self {
            Self::Namesake => has_leftovers && !name.is_empty() && predecessor() == name,
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
            let takes = |dead: &Option<&str>| {
                choice.takes(name, dead.is_some(), || dead.unwrap_or_default().into())
            };
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
    fn who_has_no_name_has_no_successor() {
        assert_eq!(choose("", &[Some(""), None]), Some((Choice::Clean, 1)));
        assert_eq!(choose("", &[Some("")]), Some((Choice::Stranger, 0)));
    }

    #[test]
    fn only_a_strangers_replies_are_told_to_nobody() {
        assert_eq!(Choice::ALL.map(Choice::disowns), [false, false, true]);
    }
}
