use std::collections::VecDeque;

use super::LeaseConfig;
use crate::time::Instant;

/// The store's answer to a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// It was taken.
    Renewed,
    /// The lease was reaped before.
    Lost,
    /// The store did not answer, or failed: the renewal was taken or not.
    Failed,
}

/// Why a lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// Another node ended it: its claims are others' now.
    Reaped,
    /// No renewal got through in time: another node may end it at any moment.
    Expired,
}

/// What the holder of a lease is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeeperEffect {
    /// Renew, and answer with [`Keeper::handle_renewed`]. Ahead of everything else that waits for
    /// the store.
    Renew {
        /// To be repeated in the answer.
        sent_at: Instant,
    },
    /// Stop every handler and forget every claim. Given once, and nothing follows it.
    Lost {
        /// Why.
        reason: LossReason,
    },
}

/// The holder's side of one lease.
///
/// After each input: [`Keeper::poll_effect`] until `None`, then [`Keeper::deadline`] is to be told to
/// those who must obey it, and [`Keeper::poll_timeout`] says when to call
/// [`Keeper::handle_timeout`]. Handlers do not wait for [`KeeperEffect::Lost`]: they read the
/// deadline before every poll.
#[derive(Debug)]
pub struct Keeper {
    config: LeaseConfig,
    deadline: Instant,
    next_renew: Instant,
    last_sent: Instant,
    over: bool,
    effects: VecDeque<KeeperEffect>,
}

impl Keeper {
    /// The keeper of a lease that the store granted; `sent_at` was read before it was asked to.
    pub fn new(config: LeaseConfig, sent_at: Instant) -> Self {
        Self {
            config,
            deadline: sent_at + config.valid(),
            next_renew: sent_at + config.period(),
            last_sent: sent_at,
            over: false,
            effects: VecDeque::new(),
        }
    }

    /// When the lease ends unless it is renewed. Never moves back, and not at all once the lease is
    /// over.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether the lease holds at `now`.
    pub fn is_valid(&self, now: Instant) -> bool {
        !self.over && now < self.deadline
    }

    /// The answer to the renewal sent at `sent_at`. Answers may be late, overlap, or come twice.
    ///
    /// One that arrives after the deadline revives nothing: handlers have stopped by then.
    pub fn handle_renewed(&mut self, now: Instant, sent_at: Instant, outcome: RenewOutcome) {
        if self.over {
            return;
        }
        if outcome == RenewOutcome::Lost {
            self.lose(LossReason::Reaped);
        } else if now >= self.deadline {
            self.lose(LossReason::Expired);
        } else if outcome == RenewOutcome::Renewed {
            // A time in the future would be a mix-up of clocks, and must not lengthen the lease.
            let sent_at = sent_at.min(now);
            self.deadline = self.deadline.max(sent_at + self.config.valid());
        } else if sent_at == self.last_sent {
            // While a later one is under way, that one decides.
            self.next_renew = self.next_renew.min(now + self.config.spacing());
        }
    }

    /// When [`Keeper::handle_timeout`] is due at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        (!self.over).then(|| self.next_renew.min(self.deadline))
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.over {
            return;
        }
        if now >= self.deadline {
            self.lose(LossReason::Expired);
        } else if now >= self.next_renew {
            self.last_sent = now;
            self.next_renew = now + self.config.period();
            self.effects.push_back(KeeperEffect::Renew { sent_at: now });
        }
    }

    /// The next thing to do, oldest first.
    pub fn poll_effect(&mut self) -> Option<KeeperEffect> {
        self.effects.pop_front()
    }

    fn lose(&mut self, reason: LossReason) {
        self.over = true;
        self.effects.clear();
        self.effects.push_back(KeeperEffect::Lost { reason });
    }
}
